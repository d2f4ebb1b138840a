// Asynchronous copies (cp.async) for kernels that run on the CPU: data arrive when their group is waited for.
#pragma once

inline void __pipeline_memcpy_async(void *shared, const void *global, unsigned long bytes) {
    machine_copy(shared, global, (int)bytes, (int)bytes);
}
inline void __pipeline_commit() { machine_commit(); }
inline void __pipeline_wait_prior(unsigned long groups) { machine_wait((int)groups); }
