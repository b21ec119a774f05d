/* te.h: registering, unregistering, finding and listing local memory. */
#include <sys/mman.h>
#include <sys/resource.h>
#include <transfer_engine_c.h>

#include "child.h"
#include "engine.h"
#include "peer.h"

static te_engine *engine;
static unsigned char memory[1 << 16];

static te_status add(size_t offset, size_t length) { return te_register_local_memory(engine, memory + offset, length, NULL); }
static te_status drop(size_t offset) { return te_unregister_local_memory(engine, memory + offset); }

static size_t count_regions(void) {
    size_t count = 4711;
    OK(te_list_local_memory(engine, NULL, sizeof(te_memory_region), 0, &count));
    return count;
}

/* Bytes in common, in every way that two ranges can have them: the text names the range in the way, and nothing has changed. */
static void overlaps_are_refused_and_touching_is_fine(void) {
    enum { START = 8192, LENGTH = 4096, END = START + LENGTH };
    static const struct {
        size_t offset, length;
    } overlapping[] = {
        {START, LENGTH},               /* identical */
        {START + 1000, 8},             /* inside */
        {START, LENGTH - 1},           /* inside, same start */
        {START + 1, LENGTH - 1},       /* inside, same end */
        {START, 1}, {END - 1, 1},      /* one byte of it */
        {START - 4096, 3 * LENGTH},    /* covering */
        {START, LENGTH + 1},           /* covering, same start */
        {START - 1, LENGTH + 1},       /* covering, same end */
        {START - 4096, 4097},          /* over the left edge by a byte ... */
        {START - 4096, 4096 + 4095},   /* ... and by all but one */
        {END - 1, 4096}, {START + 1, LENGTH}, /* over the right edge */
    };
    char text[64];
    snprintf(text, sizeof text, "[%p, %p)", (void *)(memory + START), (void *)(memory + END));
    OK(add(START, LENGTH));
    for (size_t i = 0; i < sizeof overlapping / sizeof *overlapping; i++) {
        EXPECT(TE_ERR_ADDRESS_OVERLAPPED, add(overlapping[i].offset, overlapping[i].length));
        CHECK(strstr(te_last_error(), text) != NULL);
        EXPECT(TE_ERR_ADDRESS_OVERLAPPED, registerLocalMemory((transfer_engine_t)engine, memory + overlapping[i].offset,
                                                              overlapping[i].length, "*", 1));
        EXPECT(1, count_regions());
    }
    OK(add(START - 4096, 4096));
    OK(add(END, 1));
    OK(add(END + 1, 4096));
    EXPECT(4, count_regions());
    /* Across several, whichever of them is named. */
    EXPECT(TE_ERR_ADDRESS_OVERLAPPED, add(0, sizeof memory));
    EXPECT(TE_ERR_ADDRESS_OVERLAPPED, add(END - 1, 3));
    OK(drop(START));
    EXPECT(TE_ERR_ADDRESS_OVERLAPPED, add(START - 1, LENGTH + 1));
    EXPECT(TE_ERR_ADDRESS_OVERLAPPED, add(START, LENGTH + 1));
    OK(add(START, LENGTH));
    OK(drop(START - 4096));
    OK(drop(START));
    OK(drop(END));
    OK(drop(END + 1));
    EXPECT(0, count_regions());
}

static void ranges_may_end_where_the_address_space_does_but_not_wrap(void) {
    unsigned char *last_page = (unsigned char *)(UINTPTR_MAX - 4095);
    te_buffer buffers[2] = {{memory, 64}, {last_page, 4097}};
    EXPECT(TE_ERR_INVALID_ARGUMENT, add(0, SIZE_MAX));
    EXPECT(TE_ERR_INVALID_ARGUMENT, te_register_local_memory(engine, last_page, 4097, NULL));
    EXPECT(TE_ERR_INVALID_ARGUMENT, te_register_local_memory(engine, last_page, SIZE_MAX, NULL));
    EXPECT(TE_ERR_INVALID_ARGUMENT, te_register_local_memory(engine, (void *)UINTPTR_MAX, 2, NULL));
    EXPECT(TE_ERR_INVALID_ARGUMENT, te_register_local_memory_batch(engine, buffers, sizeof buffers[0], 2, NULL));
    EXPECT(-1, registerLocalMemory((transfer_engine_t)engine, last_page, 4097, "*", 1));
    EXPECT(0, count_regions());

    /* The end of the address space is an end like any other. */
    OK(te_register_local_memory(engine, last_page, 4096, NULL));
    EXPECT(TE_ERR_ADDRESS_OVERLAPPED, te_register_local_memory(engine, (void *)UINTPTR_MAX, 1, NULL));
    OK(te_unregister_local_memory(engine, last_page));
    OK(registerLocalMemory((transfer_engine_t)engine, (void *)UINTPTR_MAX, 1, "*", 1));
    OK(te_unregister_local_memory(engine, (void *)UINTPTR_MAX));
    EXPECT(0, count_regions());
}

static void empty_and_null_ranges_are_refused_and_empty_lists_are_fine(void) {
    transfer_engine_t old = (transfer_engine_t)engine;
    EXPECT(TE_ERR_INVALID_ARGUMENT, add(0, 0));
    EXPECT(TE_ERR_INVALID_ARGUMENT, te_register_local_memory(engine, NULL, 64, NULL));
    EXPECT(TE_ERR_INVALID_ARGUMENT, te_register_local_memory(engine, NULL, 0, NULL));
    EXPECT(-1, registerLocalMemory(old, memory, 0, "*", 1));
    EXPECT(-1, registerLocalMemory(old, NULL, 64, "*", 1));
    EXPECT(-1, registerLocalMemory(old, NULL, 0, "*", 1));
    EXPECT(TE_ERR_INVALID_ARGUMENT, te_register_local_memory_batch(engine, NULL, sizeof(te_buffer), 1, NULL));
    EXPECT(-1, registerLocalMemoryBatch(old, NULL, 1, "*"));
    REFUSED(te_unregister_local_memory_batch(engine, NULL, 1));
    CHECK(unregisterLocalMemoryBatch(old, NULL, 1) < 0);
    OK(te_register_local_memory_batch(engine, NULL, sizeof(te_buffer), 0, NULL));
    OK(te_unregister_local_memory_batch(engine, NULL, 0));
    OK(registerLocalMemoryBatch(old, NULL, 0, "*"));
    OK(unregisterLocalMemoryBatch(old, NULL, 0));
    EXPECT(0, count_regions());
}

static void unregistering_takes_the_exact_start_once(void) {
    static const size_t inside[] = {4097, 6000, 8191}, outside[] = {0, 4095, 8192, 8193};
    OK(add(4096, 4096));
    for (size_t i = 0; i < sizeof inside / sizeof *inside; i++) EXPECT(TE_ERR_ADDRESS_NOT_REGISTERED, drop(inside[i]));
    for (size_t i = 0; i < sizeof outside / sizeof *outside; i++) EXPECT(TE_ERR_ADDRESS_NOT_REGISTERED, drop(outside[i]));
    EXPECT(TE_ERR_ADDRESS_NOT_REGISTERED, te_unregister_local_memory(engine, (void *)UINTPTR_MAX));
    EXPECT(-3, unregisterLocalMemory((transfer_engine_t)engine, memory + 4097));
    /* It is as it was. */
    EXPECT(1, count_regions());
    OK(transfer(engine, TE_WRITE, memory, TE_LOCAL_SEGMENT, (uintptr_t)(memory + 4096), 4096));
    OK(drop(4096));
    EXPECT(TE_ERR_ADDRESS_NOT_REGISTERED, drop(4096));
    EXPECT(-3, unregisterLocalMemory((transfer_engine_t)engine, memory + 4096));
    REFUSED(transfer(engine, TE_WRITE, memory, TE_LOCAL_SEGMENT, (uintptr_t)(memory + 4096), 4096));
}

enum { MANY = 100 };

static void list_many(te_buffer *buffers, void **addrs) {
    for (size_t i = 0; i < MANY; i++) {
        addrs[i] = memory + 512 * i;
        buffers[i].addr = addrs[i];
        buffers[i].length = 512;
    }
}

/* Whatever is wrong with an entry, and wherever it stands: nothing of the batch stays, and all can be registered at once. */
static void a_batch_with_a_bad_entry_registers_nothing(void) {
    static const size_t places[] = {0, 57, MANY - 1};
    te_buffer buffers[MANY];
    void *addrs[MANY];
    list_many(buffers, addrs);
    unsigned char *taken = memory + 512 * MANY;
    OK(te_register_local_memory(engine, taken, 512, NULL));
    for (size_t i = 0; i < sizeof places / sizeof *places; i++) {
        const te_buffer bad[] = {
            {memory, 0},
            {NULL, 512},
            {buffers[places[i]].addr, SIZE_MAX},
            {buffers[places[i] == 0 ? 1 : places[i] - 1].addr, 512}, /* twice in one batch */
            {taken + 511, 1},
        };
        for (size_t kind = 0; kind < sizeof bad / sizeof *bad; kind++) {
            te_buffer good = buffers[places[i]];
            te_status expected = kind < 3 ? TE_ERR_INVALID_ARGUMENT : TE_ERR_ADDRESS_OVERLAPPED;
            buffers[places[i]] = bad[kind];
            EXPECT(expected, te_register_local_memory_batch(engine, buffers, sizeof buffers[0], MANY, NULL));
            CHECK(*te_last_error());
            EXPECT(expected, registerLocalMemoryBatch((transfer_engine_t)engine, (buffer_entry_t *)buffers, MANY, "*"));
            EXPECT(1, count_regions());
            buffers[places[i]] = good;
            OK(te_register_local_memory_batch(engine, buffers, sizeof buffers[0], MANY, NULL));
            EXPECT(1 + MANY, count_regions());
            OK(te_unregister_local_memory_batch(engine, addrs, MANY));
        }
    }
    OK(te_unregister_local_memory(engine, taken));
    EXPECT(0, count_regions());
}

/* One unknown address, or several: the others go, the first error is told. */
static void a_batch_unregisters_all_it_can(void) {
    static const size_t unknown[][3] = {{0, 0, 0}, {57, 57, 57}, {MANY - 1, MANY - 1, MANY - 1}, {3, 50, 98}};
    te_buffer buffers[MANY];
    void *addrs[MANY];
    for (size_t i = 0; i < sizeof unknown / sizeof *unknown; i++) {
        for (int old = 0; old < 2; old++) {
            size_t left = i == 3 ? 3 : 1;
            list_many(buffers, addrs);
            OK(te_register_local_memory_batch(engine, buffers, sizeof buffers[0], MANY, NULL));
            for (size_t j = 0; j < left; j++) addrs[unknown[i][j]] = memory + 512 * unknown[i][j] + 1;
            EXPECT(-3, old ? unregisterLocalMemoryBatch((transfer_engine_t)engine, addrs, MANY)
                           : te_unregister_local_memory_batch(engine, addrs, MANY));
            char first[32];
            snprintf(first, sizeof first, "%p", addrs[unknown[i][0]]);
            CHECK(strstr(te_last_error(), first) != NULL);
            EXPECT(left, count_regions());
            for (size_t j = 0; j < left; j++) OK(drop(512 * unknown[i][j]));
        }
    }
    /* An address that comes twice is unknown the second time. */
    list_many(buffers, addrs);
    OK(te_register_local_memory_batch(engine, buffers, sizeof buffers[0], MANY, NULL));
    addrs[80] = addrs[79];
    EXPECT(TE_ERR_ADDRESS_NOT_REGISTERED, te_unregister_local_memory_batch(engine, addrs, MANY));
    EXPECT(1, count_regions());
    OK(drop(512 * 80));
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

static te_status write_to_own(size_t offset) {
    return transfer(engine, TE_WRITE, memory + 32768, TE_LOCAL_SEGMENT, (uintptr_t)(memory + offset), 64);
}

/* The same again is refused unless both ask to be counted, and is the same in all respects. */
static void references_are_counted_on_request(void) {
    enum { TIMES = 100 };
    te_memory_options options = make_memory_options(), other;
    te_buffer buffer = {memory, 4096};
    void *addr = memory;
    OK(add(0, 4096));
    EXPECT(TE_ERR_ADDRESS_OVERLAPPED, add(0, 4096));
    options.count_references = TE_REFERENCES_ON;
    EXPECT(TE_ERR_ADDRESS_OVERLAPPED, te_register_local_memory(engine, memory, 4096, &options));
    OK(drop(0));

    for (int i = 0; i < TIMES; i++) OK(te_register_local_memory(engine, memory, 4096, &options));
    EXPECT(TE_ERR_ADDRESS_OVERLAPPED, add(0, 4096));
    EXPECT(TE_ERR_ADDRESS_OVERLAPPED, te_register_local_memory(engine, memory, 4095, &options));
    EXPECT(TE_ERR_ADDRESS_OVERLAPPED, te_register_local_memory(engine, memory + 1, 4095, &options));
    other = options;
    other.location = "cpu:0";
    EXPECT(TE_ERR_ADDRESS_OVERLAPPED, te_register_local_memory(engine, memory, 4096, &other));
    other = options;
    other.access = TE_ACCESS_LOCAL;
    EXPECT(TE_ERR_ADDRESS_OVERLAPPED, te_register_local_memory(engine, memory, 4096, &other));
    OK(te_register_local_memory_batch(engine, &buffer, sizeof buffer, 1, &options));
    EXPECT(1, count_regions());
    OK(te_unregister_local_memory_batch(engine, &addr, 1));
    for (int i = 1; i < TIMES; i++) {
        OK(drop(0));
        EXPECT(1, count_regions());
        OK(write_to_own(0));
    }
    OK(drop(0));
    EXPECT(0, count_regions());
    REFUSED(write_to_own(0));
    EXPECT(TE_ERR_ADDRESS_NOT_REGISTERED, drop(0));
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
    const char *locations[] = {"*", "", NULL, "cpu", "cpu:", "cpu:0", "cpu:99", "cpu:-1", "cpu:99999999999999999999", "cuda:0", "segments:1:0",
                               "\xff\xfe not UTF-8 \x01", "\"quoted\\\"", long_text};
    te_engine *other = create_engine();
    te_segment segment;
    char address[256];
    OK(te_engine_address(engine, address, sizeof address));
    OK(te_open_segment(other, address, &segment));
    memset(long_text, 'x', sizeof long_text - 1);
    for (size_t i = 0; i < sizeof locations / sizeof *locations; i++) {
        te_memory_options options = make_memory_options();
        te_memory_region region;
        size_t count;
        options.location = locations[i];
        OK(te_register_local_memory(engine, memory, 4096, &options));
        memset(&region, 0, sizeof region);
        region.struct_size = sizeof region;
        OK(te_find_local_memory(engine, memory, &region));
        CHECK(memchr(region.location, '\0', sizeof region.location) != NULL);
        /* Peers can make sense of it. */
        OK(te_refresh_segment(other, segment));
        OK(te_list_segment_memory(other, segment, &region, sizeof region, 1, &count));
        EXPECT(1, count);
        EXPECT((uintptr_t)memory, region.addr);
        OK(transfer(other, TE_READ, memory + 8192, segment, (uintptr_t)memory, 4096));
        OK(drop(0));
        OK(registerLocalMemory((transfer_engine_t)engine, memory, 4096, locations[i], 1));
        OK(unregisterLocalMemory((transfer_engine_t)engine, memory));
    }
    OK(te_engine_destroy(other));
}

static size_t count_present_pages(unsigned char *pages, size_t length) {
    static unsigned char present[1024];
    size_t count = 0;
    CHECK(mincore(pages, length, present) == 0);
    for (size_t i = 0; i < length / 4096; i++) count += present[i] & 1;
    return count;
}

/* Memory that was only reserved stays so, even where none may be locked: no location makes pages, and nothing is pinned. */
static void untouched_memory_stays_untouched(void) {
    static const char *const locations[] = {"*", NULL, "", "cpu:0"};
    const size_t reserved = (size_t)256 << 30, looked_at = 1024 * 4096;
    unsigned char *pages = mmap(NULL, reserved, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (pages == MAP_FAILED) return; /* too much for this system, or for a tool that watches the test */
    struct rlimit limit, none;
    CHECK(getrlimit(RLIMIT_MEMLOCK, &limit) == 0);
    none = limit;
    none.rlim_cur = 0;
    CHECK(setrlimit(RLIMIT_MEMLOCK, &none) == 0);
    for (size_t i = 0; i < sizeof locations / sizeof *locations; i++) {
        te_memory_options options = make_memory_options();
        options.location = locations[i];
        OK(te_register_local_memory(engine, pages, reserved, &options));
        EXPECT(0, count_present_pages(pages, looked_at));
        EXPECT(0, count_present_pages(pages + reserved / 2, looked_at));
        OK(te_unregister_local_memory(engine, pages));
        OK(registerLocalMemory((transfer_engine_t)engine, pages, reserved, locations[i], 1));
        OK(unregisterLocalMemory((transfer_engine_t)engine, pages));
        EXPECT(0, count_present_pages(pages + reserved - looked_at, looked_at));
    }
    CHECK(setrlimit(RLIMIT_MEMLOCK, &limit) == 0);
    CHECK(munmap(pages, reserved) == 0);
}

/* Peers reach neither the memory nor a range that has a byte of it; their own transfers may use it. */
static void memory_for_local_use_is_closed_to_peers(void) {
    enum { PRIVATE = 4096, LENGTH = 4096 };
    te_memory_options options = make_memory_options();
    te_engine *other = create_engine();
    te_segment segment, back;
    char address[256];
    size_t count;
    options.access = TE_ACCESS_LOCAL;
    OK(add(0, PRIVATE));
    OK(te_register_local_memory(engine, memory + PRIVATE, LENGTH, &options));
    OK(add(PRIVATE + LENGTH, 4096));
    OK(te_register_local_memory(other, memory + 32768, 16384, NULL));
    OK(te_engine_address(engine, address, sizeof address));
    OK(te_open_segment(other, address, &segment));
    OK(te_engine_address(other, address, sizeof address));
    OK(te_open_segment(engine, address, &back));
    OK(te_list_segment_memory(other, segment, NULL, sizeof(te_memory_region), 0, &count));
    EXPECT(2, count);
    static const struct {
        size_t offset, length;
    } ranges[] = {{PRIVATE, LENGTH}, {PRIVATE, 1}, {PRIVATE + LENGTH - 1, 1}, {PRIVATE - 1, 2}, {PRIVATE + LENGTH - 1, 2}, {0, 3 * 4096}};
    fill(memory, 3 * 4096, 1);
    fill(memory + 32768, 16384, 2);
    uint64_t before = checksum(memory, 3 * 4096), others = checksum(memory + 32768, 16384);
    for (size_t i = 0; i < sizeof ranges / sizeof *ranges; i++) {
        for (int opcode = TE_READ; opcode <= TE_WRITE; opcode++) {
            uint64_t remote = (uintptr_t)(memory + ranges[i].offset);
            REFUSED(transfer(other, (te_opcode)opcode, memory + 32768, segment, remote, ranges[i].length));
            REFUSED(transfer(engine, (te_opcode)opcode, memory + 32768, TE_LOCAL_SEGMENT, remote, ranges[i].length));
        }
    }
    EXPECT(before, checksum(memory, 3 * 4096));
    EXPECT(others, checksum(memory + 32768, 16384));
    OK(transfer(other, TE_READ, memory + 32768, segment, (uintptr_t)memory, 4096));

    /* As the local side. */
    OK(transfer(engine, TE_WRITE, memory + PRIVATE, back, (uintptr_t)(memory + 32768), LENGTH));
    CHECK(memcmp(memory + PRIVATE, memory + 32768, LENGTH) == 0);
    fill(memory + 32768, LENGTH, 3);
    OK(transfer(engine, TE_READ, memory + PRIVATE, back, (uintptr_t)(memory + 32768), LENGTH));
    CHECK(memcmp(memory + PRIVATE, memory + 32768, LENGTH) == 0);
    OK(te_engine_destroy(other));
    OK(drop(0));
    OK(drop(PRIVATE));
    OK(drop(PRIVATE + LENGTH));
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
    ranges_may_end_where_the_address_space_does_but_not_wrap();
    empty_and_null_ranges_are_refused_and_empty_lists_are_fine();
    unregistering_takes_the_exact_start_once();
    a_batch_with_a_bad_entry_registers_nothing();
    a_batch_unregisters_all_it_can();
    regions_are_found_by_any_address_inside();
    lists_are_in_registration_order_and_tell_the_total();
    references_are_counted_on_request();
    unknown_option_values_are_refused();
    untouched_memory_stays_untouched();
    any_location_is_taken();
    memory_for_local_use_is_closed_to_peers();
    statistics_count_what_happened();
    OK(te_engine_destroy(engine));
    return 0;
}
