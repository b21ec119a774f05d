// Memory as upstream's programs have it: from libnuma, or where that is not installed from the system.
#pragma once

#include <common.h>

#include <cstddef>

#if !defined(TRANSFER_ENGINE_WITHOUT_NUMA) && __has_include(<numa.h>)
inline int count_nodes() { return numa_available() < 0 ? 1 : numa_num_configured_nodes(); }
inline void* allocate_on_node(std::size_t length, int node) { return numa_alloc_onnode(length, node); }
inline void free_on_node(void* memory, std::size_t length) { numa_free(memory, length); }
#else
inline int count_nodes() { return 1; }
inline void* allocate_on_node(std::size_t length, int) {
    void* memory = mmap(nullptr, length, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    return memory == MAP_FAILED ? nullptr : memory;
}
inline void free_on_node(void* memory, std::size_t length) { munmap(memory, length); }
#endif
