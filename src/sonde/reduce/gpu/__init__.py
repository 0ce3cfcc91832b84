"""Many tensors in one launch on a GPU, and the way of results to the host. Never waits for the device."""
