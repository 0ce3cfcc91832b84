"""Many tensors in one pass on the CPU, by the native kernel if there is one."""
