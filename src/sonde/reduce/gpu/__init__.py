"""Many tensors in one launch on a GPU, and the copy of results to the host. Never waits for the device."""
