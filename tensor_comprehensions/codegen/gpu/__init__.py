"""Loop programs in, CUDA C++ or OpenCL C out."""
