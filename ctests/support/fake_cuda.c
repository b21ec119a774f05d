/* The one function of a CUDA driver that the library asks, and one that says which memory is the device's. */
#include <stddef.h>
#include <stdint.h>

static uintptr_t start, end;

void fake_cuda_own(void *memory, size_t length);
int cuPointerGetAttribute(void *value, int attribute, unsigned long long address);

void fake_cuda_own(void *memory, size_t length) {
    start = (uintptr_t)memory;
    end = start + length;
}

int cuPointerGetAttribute(void *value, int attribute, unsigned long long address) {
    enum { INVALID_VALUE = 1, MEMORY_TYPE = 2, IS_MANAGED = 8, DEVICE = 2 };
    if (address < start || address >= end) return INVALID_VALUE;
    if (attribute == MEMORY_TYPE) {
        *(unsigned int *)value = DEVICE;
        return 0;
    }
    if (attribute == IS_MANAGED) {
        *(unsigned int *)value = 0;
        return 0;
    }
    return INVALID_VALUE;
}
