/* te.h: registering, unregistering, finding and listing local memory. */
#include <sys/mman.h>

#include "child.h"
#include "engine.h"

static te_engine *engine;
static unsigned char memory[1 << 16];

static te_status add(size_t offset, size_t length) { return te_register_local_memory(engine, memory + offset, length, NULL); }
static te_status drop(size_t offset) { return te_unregister_local_memory(engine, memory + offset); }

static size_t count_regions(void) {
    size_t count = 4711;
    OK(te_list_local_memory(engine, NULL, sizeof(te_memory_region), 0, &count));
    return count;
}

static void overlaps_are_refused_and_touching_is_fine(void) {
    OK(add(4096, 4096));
    EXPECT(TE_ERR_ADDRESS_OVERLAPPED, add(4096, 4096));
    EXPECT(TE_ERR_ADDRESS_OVERLAPPED, add(5000, 8));
    EXPECT(TE_ERR_ADDRESS_OVERLAPPED, add(0, 16384));
    EXPECT(TE_ERR_ADDRESS_OVERLAPPED, add(0, 4097));
    EXPECT(TE_ERR_ADDRESS_OVERLAPPED, add(8191, 2));
    OK(add(0, 4096));
    OK(add(8192, 1));
    EXPECT(3, count_regions());
    OK(drop(0));
    OK(drop(4096));
    OK(drop(8192));
    EXPECT(0, count_regions());
}

static void the_text_names_the_range_in_the_way(void) {
    char text[64];
    OK(add(4096, 4096));
    EXPECT(TE_ERR_ADDRESS_OVERLAPPED, add(8000, 4096));
    snprintf(text, sizeof text, "[%p, %p)", (void *)(memory + 4096), (void *)(memory + 8192));
    CHECK(strstr(te_last_error(), text) != NULL);
    OK(drop(4096));
}

static void odd_ranges_are_refused(void) {
    EXPECT(TE_ERR_INVALID_ARGUMENT, add(0, 0));
    EXPECT(TE_ERR_INVALID_ARGUMENT, te_register_local_memory(engine, NULL, 64, NULL));
    EXPECT(TE_ERR_INVALID_ARGUMENT, add(0, SIZE_MAX));
    EXPECT(TE_ERR_INVALID_ARGUMENT, te_register_local_memory(engine, (void *)(UINTPTR_MAX - 4095), 4097, NULL));
    EXPECT(0, count_regions());

    /* The end of the address space is an end like any other. */
    OK(te_register_local_memory(engine, (void *)(UINTPTR_MAX - 4095), 4096, NULL));
    EXPECT(TE_ERR_ADDRESS_OVERLAPPED, te_register_local_memory(engine, (void *)UINTPTR_MAX, 1, NULL));
    OK(te_unregister_local_memory(engine, (void *)(UINTPTR_MAX - 4095)));
}

static void unregistering_takes_the_exact_start(void) {
    OK(add(0, 4096));
    EXPECT(TE_ERR_ADDRESS_NOT_REGISTERED, drop(1));
    EXPECT(TE_ERR_ADDRESS_NOT_REGISTERED, drop(8192));
    EXPECT(1, count_regions());
    OK(drop(0));
    EXPECT(TE_ERR_ADDRESS_NOT_REGISTERED, drop(0));
}

static void batches_are_all_or_nothing(void) {
    te_buffer buffers[100];
    void *addrs[100];
    for (size_t i = 0; i < 100; i++) {
        buffers[i].addr = addrs[i] = memory + 512 * i;
        buffers[i].length = 512;
    }
    buffers[57].length = 0;
    EXPECT(TE_ERR_INVALID_ARGUMENT, te_register_local_memory_batch(engine, buffers, sizeof buffers[0], 100, NULL));
    EXPECT(0, count_regions());
    buffers[57].length = 513;
    EXPECT(TE_ERR_ADDRESS_OVERLAPPED, te_register_local_memory_batch(engine, buffers, sizeof buffers[0], 100, NULL));
    EXPECT(0, count_regions());
    buffers[57].length = 512;
    OK(te_register_local_memory_batch(engine, buffers, sizeof buffers[0], 100, NULL));
    EXPECT(100, count_regions());

    /* One unknown address among a hundred: the others go, the error is told. */
    addrs[30] = memory + 512 * 30 + 1;
    EXPECT(TE_ERR_ADDRESS_NOT_REGISTERED, te_unregister_local_memory_batch(engine, addrs, 100));
    EXPECT(1, count_regions());
    OK(drop(512 * 30));
}

static void regions_are_found_by_any_address_inside(void) {
    te_memory_region region;
    te_memory_options options = make_memory_options();
    memset(&region, 0, sizeof region);
    region.struct_size = sizeof region;
    options.access = TE_ACCESS_LOCAL;
    options.location = "cpu:0";
    OK(te_register_local_memory(engine, memory + 100, 50, &options));
    EXPECT(TE_ERR_ADDRESS_NOT_REGISTERED, te_find_local_memory(engine, memory + 99, &region));
    EXPECT(TE_ERR_ADDRESS_NOT_REGISTERED, te_find_local_memory(engine, memory + 150, &region));
    OK(te_find_local_memory(engine, memory + 149, &region));
    CHECK(region.addr == (uintptr_t)(memory + 100) && region.length == 50);
    EXPECT(TE_ACCESS_LOCAL, region.access);
    CHECK(strcmp(region.location, "cpu:0") == 0);
    OK(drop(100));
}

static void lists_are_in_registration_order_and_tell_the_total(void) {
    te_memory_region regions[3];
    size_t count;
    OK(add(512, 512));
    OK(add(0, 512));
    OK(add(2048, 512));
    memset(regions, 0, sizeof regions);
    OK(te_list_local_memory(engine, regions, sizeof regions[0], 2, &count));
    EXPECT(3, count);
    EXPECT((uintptr_t)(memory + 512), regions[0].addr);
    EXPECT((uintptr_t)memory, regions[1].addr);
    EXPECT(0, regions[2].addr);
    OK(te_list_local_memory(engine, regions, sizeof regions[0], 3, &count));
    EXPECT((uintptr_t)(memory + 2048), regions[2].addr);
    OK(drop(0));
    OK(drop(512));
    OK(drop(2048));
}

static void references_are_counted_on_request(void) {
    te_memory_options options = make_memory_options();
    options.count_references = TE_REFERENCES_ON;
    OK(te_register_local_memory(engine, memory, 4096, &options));
    OK(te_register_local_memory(engine, memory, 4096, &options));
    EXPECT(TE_ERR_ADDRESS_OVERLAPPED, te_register_local_memory(engine, memory, 4095, &options));
    OK(drop(0));
    EXPECT(1, count_regions());
    OK(drop(0));
    EXPECT(0, count_regions());
    options.count_references = TE_REFERENCES_OFF;
    OK(te_register_local_memory(engine, memory, 4096, &options));
    EXPECT(TE_ERR_ADDRESS_OVERLAPPED, te_register_local_memory(engine, memory, 4096, &options));
    OK(drop(0));
}

/* What TE_REGISTER_REFCOUNT says is the default; a call can still say otherwise. */
static void count_by_the_environment(void *unused) {
    (void)unused;
    te_memory_options options = make_memory_options();
    setenv("TE_REGISTER_REFCOUNT", "1", 1);
    engine = create_engine();
    OK(add(0, 4096));
    OK(add(0, 4096));
    EXPECT(TE_ERR_ADDRESS_OVERLAPPED, add(0, 4095));
    options.count_references = TE_REFERENCES_OFF;
    EXPECT(TE_ERR_ADDRESS_OVERLAPPED, te_register_local_memory(engine, memory, 4096, &options));
    OK(drop(0));
    EXPECT(1, count_regions());
    OK(drop(0));
    EXPECT(TE_ERR_ADDRESS_NOT_REGISTERED, drop(0));
    OK(te_engine_destroy(engine));
}

static void references_are_counted_if_the_environment_says_so(void) { in_child(count_by_the_environment, NULL); }

static void unknown_option_values_are_refused(void) {
    te_memory_options options = make_memory_options();
    options.access = 77;
    EXPECT(TE_ERR_INVALID_ARGUMENT, te_register_local_memory(engine, memory, 4096, &options));
    options = make_memory_options();
    options.publish = 77;
    EXPECT(TE_ERR_INVALID_ARGUMENT, te_register_local_memory(engine, memory, 4096, &options));
    options = make_memory_options();
    options.count_references = 77;
    EXPECT(TE_ERR_INVALID_ARGUMENT, te_register_local_memory(engine, memory, 4096, &options));
}

static void any_location_is_taken(void) {
    static char long_text[10 << 10];
    const char *locations[] = {"*", "", "cpu:99", "cpu:-1", "cuda:0", long_text};
    memset(long_text, 'x', sizeof long_text - 1);
    for (size_t i = 0; i < sizeof locations / sizeof *locations; i++) {
        te_memory_options options = make_memory_options();
        te_memory_region region;
        options.location = locations[i];
        OK(te_register_local_memory(engine, memory, 4096, &options));
        memset(&region, 0, sizeof region);
        region.struct_size = sizeof region;
        OK(te_find_local_memory(engine, memory, &region));
        CHECK(memchr(region.location, '\0', sizeof region.location) != NULL);
        OK(drop(0));
    }
}

static size_t count_present_pages(unsigned char *pages, size_t length) {
    static unsigned char present[1024];
    size_t count = 0;
    CHECK(mincore(pages, length, present) == 0);
    for (size_t i = 0; i < length / 4096; i++) count += present[i] & 1;
    return count;
}

/* Memory that was only reserved stays so: the wildcard looks at where pages are, it does not make them. */
static void untouched_memory_stays_untouched(void) {
    const size_t reserved = (size_t)256 << 30, looked_at = 1024 * 4096;
    unsigned char *pages = mmap(NULL, reserved, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (pages == MAP_FAILED) return; /* too much for this system, or for a tool that watches the test */
    OK(te_register_local_memory(engine, pages, reserved, NULL));
    EXPECT(0, count_present_pages(pages, looked_at));
    EXPECT(0, count_present_pages(pages + reserved / 2, looked_at));
    OK(te_unregister_local_memory(engine, pages));
    EXPECT(0, count_present_pages(pages + reserved - looked_at, looked_at));
    CHECK(munmap(pages, reserved) == 0);
}

static void statistics_count_what_happened(void) {
    te_statistics before, after;
    memset(&before, 0, sizeof before);
    before.struct_size = sizeof before;
    after = before;
    OK(te_get_statistics(engine, &before));
    OK(add(0, 4096));
    REFUSED(add(0, 4096));
    OK(te_get_statistics(engine, &after));
    EXPECT(before.regions_registered + 1, after.regions_registered);
    EXPECT(before.registrations_refused + 1, after.registrations_refused);
    OK(drop(0));
    OK(te_get_statistics(engine, &after));
    EXPECT(before.regions_unregistered + 1, after.regions_unregistered);
}

int main(void) {
    references_are_counted_if_the_environment_says_so();
    engine = create_engine();
    overlaps_are_refused_and_touching_is_fine();
    the_text_names_the_range_in_the_way();
    odd_ranges_are_refused();
    unregistering_takes_the_exact_start();
    batches_are_all_or_nothing();
    regions_are_found_by_any_address_inside();
    lists_are_in_registration_order_and_tell_the_total();
    references_are_counted_on_request();
    unknown_option_values_are_refused();
    untouched_memory_stays_untouched();
    any_location_is_taken();
    statistics_count_what_happened();
    OK(te_engine_destroy(engine));
    return 0;
}
