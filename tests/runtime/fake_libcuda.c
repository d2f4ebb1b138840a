// What CuPy calls of NVIDIA's driver to load and launch, on the processor: it prints what it is asked for.
#include <stdio.h>
#include <string.h>

typedef unsigned long long address;
static void *context;

int cuGetErrorName(int code, const char **name) { return *name = "CUDA_ERROR_PLAYED", 0; }
int cuGetErrorString(int code, const char **text) { return *text = "it is only played", 0; }
int cuCtxGetCurrent(void **now) { return *now = context, 0; }
int cuCtxSetCurrent(void *now) { return context = now, printf("context %p\n", now), 0; }

int cuModuleLoadData(void **module, const char *image) {
    if (strcmp(image, "machine code")) return 200;
    return *module = (void *)0x7f0000000010, 0;
}

int cuModuleGetFunction(void **function, void *module, const char *name) {
    if (module != (void *)0x7f0000000010) return 400;
    if (strcmp(name, "scale") && strcmp(name, "refused")) return 500;
    return *function = (void *)(name[0] == 's' ? 0x7f0000000020 : 0x7f0000000030), 0;
}

int cuFuncSetAttribute(void *function, int attribute, int value) {
    return printf("attribute %d of %p is %d\n", attribute, function, value), 0;
}

int cuFuncGetAttribute(int *value, int attribute, void *function) { return *value = 100 + attribute, 0; }

int cuLaunchKernel(void *function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                   unsigned shared, void *stream, void **parameters, void **extra) {
    if (function != (void *)0x7f0000000020) return 701;
    return printf("launch %u %u %u, %u %u %u, %u, %p, %llx %llx, %p\n", gx, gy, gz, bx, by, bz, shared, stream,
                  *(address *)parameters[0], *(address *)parameters[1], (void *)extra), 0;
}
