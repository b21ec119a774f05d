// The class allocates nothing for a request that the batch has not brought along: a submission of many costs as many allocations more
// than the C function beneath it as one of one request does.
#include <cstdlib>

#include "submission.hpp"

extern "C" {
void* __libc_malloc(std::size_t);
void* __libc_calloc(std::size_t, std::size_t);
void* __libc_realloc(void*, std::size_t);
void* __libc_memalign(std::size_t, std::size_t);
}

// Volatile, for a compiler takes an allocation for something that changes no variable.
static thread_local volatile std::size_t allocations = 0;

// Whoever allocates in this process, by new too, comes here.
extern "C" {
void* malloc(std::size_t size) {
    allocations = allocations + 1;
    return __libc_malloc(size);
}
void* calloc(std::size_t count, std::size_t size) {
    allocations = allocations + 1;
    return __libc_calloc(count, size);
}
void* realloc(void* memory, std::size_t size) {
    allocations = allocations + 1;
    return __libc_realloc(memory, size);
}
void* aligned_alloc(std::size_t alignment, std::size_t size) {
    allocations = allocations + 1;
    return __libc_memalign(alignment, size);
}
int posix_memalign(void** memory, std::size_t alignment, std::size_t size) {
    allocations = allocations + 1;
    *memory = __libc_memalign(alignment, size);
    return *memory == nullptr ? 12 : 0;
}
}

struct Count {
    std::size_t by_class, by_c;
};

// The least of some runs: the first ones of a thread allocate what is kept.
static Count count(std::size_t requests) {
    Submission submission(requests);
    Count least{~std::size_t{0}, ~std::size_t{0}};
    for (int run = 0; run < 10; run++) {
        std::size_t before = 0, by_class = 0, by_c = 0;
        submission.run_by_class([&] { before = allocations; }, [&] { by_class = allocations - before; });
        submission.run_by_c([&] { before = allocations; }, [&] { by_c = allocations - before; });
        least = {std::min(least.by_class, by_class), std::min(least.by_c, by_c)};
    }
    return least;
}

static void allocations_are_seen() {
    const std::size_t before = allocations;
    // Volatile, or a compiler may leave out what nobody reads.
    std::vector<int>* volatile made = new std::vector<int>(1000);
    REQUIRE(allocations - before >= 2);
    delete made;
}

static void a_request_allocates_nothing_beyond_its_batch() {
    const Count one = count(1), many = count(4096);
    std::printf("1 request: %zu allocations by the class, %zu by the C function; 4096 requests: %zu and %zu\n", one.by_class, one.by_c,
                many.by_class, many.by_c);
    EXPECT(one.by_class - one.by_c, many.by_class - many.by_c);
    EXPECT(many.by_c, many.by_class);
}

int main() {
    allocations_are_seen();
    a_request_allocates_nothing_beyond_its_batch();
}
