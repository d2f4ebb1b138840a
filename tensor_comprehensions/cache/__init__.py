"""The cache on disk: kernels that earlier processes compiled, and measurements of options.

Code is executed only after its digest is verified, and any fault of the disk is a cache miss.

Measurements (`measurement_store`) are data: protobuf messages that may be merged, committed and sent to others.
Compiled code (`stored_kernels`) stays with the user and the machine that made it, unless it is signed with a secret
key.
"""
