"""Keys, entries and the store on disk: what earlier processes compiled and measured.

Comes in: a bound def, options and a target; goes out: what is known of them. Always holds: nothing that is read is
executed or unpickled before its digest is verified, and whatever is wrong with the disk, the answer is "not known".

Two layers. Measurements of options (`tuning`) are data: protobuf messages that may be merged, committed and sent to
others. Compiled code (`code`) stays with the user and the machine that made it, unless a secret key says otherwise.
"""
