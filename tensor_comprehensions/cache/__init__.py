"""Keys, entries and the store on disk: what earlier processes compiled and measured.

Comes in: a bound def, options and a target; goes out: kernels and measurements. Always holds: data is executed or
unpickled only after its digest is verified, and any fault of the disk is a cache miss.

Two layers. Measurements of options (`tuning`) are data: protobuf messages that may be merged, committed and sent to
others. Compiled code (`code`) stays with the user and the machine that made it, unless it is signed with a secret key.
"""
