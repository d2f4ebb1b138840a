"""Loop programs of kernels in, better ones out: unrolling, double buffers, full tiles without guards."""
