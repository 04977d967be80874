"""The CUDA toolkit, where the engine needs one."""
