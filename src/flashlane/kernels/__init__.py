"""The kernels, a folder a family; each is a device file and a Python file of the same name."""
