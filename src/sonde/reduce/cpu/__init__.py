"""Many tensors in one pass on the CPU, by the native kernel where there is one."""
