/* te.h: transfers of up to 5 GiB. Both engines are in this process, and see each other as any peer: over TCP. */
#define _GNU_SOURCE
#include <sys/mman.h>
#include <unistd.h>

#include "engine.h"
#include "peer.h"

static te_segment segment;

/* One file, mapped over and over: a range of more than 4 GiB that takes little memory. */
static unsigned char *map_repeatedly(size_t piece, size_t count) {
    int fd = memfd_create("piece", MFD_CLOEXEC);
    CHECK(fd >= 0 && ftruncate(fd, (off_t)piece) == 0);
    unsigned char *base = mmap(NULL, piece * count, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    CHECK(base != MAP_FAILED);
    for (size_t i = 0; i < count; i++)
        CHECK(mmap(base + i * piece, piece, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, fd, 0) != MAP_FAILED);
    close(fd);
    return base;
}

/* Each by its own bytes: the source begins elsewhere each time. */
static void lengths_around_powers_of_two_are_byte_exact_to_1_gib(void) {
    const size_t most = ((size_t)1 << 30) + 4096;
    char address[256];
    te_engine *target = create_engine(), *initiator = create_engine();
    unsigned char *maps[2];
    for (int i = 0; i < 2; i++) {
        maps[i] = mmap(NULL, most, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        CHECK(maps[i] != MAP_FAILED);
        madvise(maps[i], most, MADV_HUGEPAGE);
        OK(te_register_local_memory(target, maps[i], most, NULL));
    }
    unsigned char *from = maps[0], *to = maps[1];
    fill(from, most, 9);
    OK(te_engine_address(target, address, sizeof address));
    OK(te_open_segment(initiator, address, &segment));
    for (size_t power = 24; power <= 30; power++) {
        for (size_t i = 0; i < 3; i++) {
            size_t length = ((size_t)1 << power) + i - 1, start = 3 * power + i;
            int writes = (power + i) % 2;
            if (writes) {
                to[start - 1] = to[start + length] = 0x5a;
                OK(transfer(initiator, TE_WRITE, from + 2 * start, segment, (uintptr_t)(to + start), length));
                CHECK(memcmp(from + 2 * start, to + start, length) == 0);
                CHECK(to[start - 1] == 0x5a && to[start + length] == 0x5a);
            }
            if (!writes || power < 28) {
                to[start] = to[start + length + 1] = 0x5a;
                OK(transfer(initiator, TE_READ, to + start + 1, segment, (uintptr_t)(from + 5 * start), length));
                CHECK(memcmp(from + 5 * start, to + start + 1, length) == 0);
                CHECK(to[start] == 0x5a && to[start + length + 1] == 0x5a);
            }
        }
    }
    OK(te_engine_destroy(initiator));
    OK(te_engine_destroy(target));
    for (int i = 0; i < 2; i++) munmap(maps[i], most);
}

/* Checks what 5 GiB that end at `end` have left in the last piece that is mapped over and over. */
static void check_last_piece(const unsigned char *to, size_t offset, size_t length, size_t piece, const unsigned char *from) {
    size_t last = (offset + length) / piece * piece, end = offset + length - last;
    /* The last piece holds the end of the source, and behind that what came one piece earlier. */
    CHECK(memcmp(to + last, from + (length - end), end) == 0);
    CHECK(memcmp(to + last + end, from + (length - piece), piece - end) == 0);
}

static void lengths_beyond_4_gib_are_whole(void) {
    /* Different pieces, so that a part that is left out, comes twice or lands elsewhere is seen. */
    const size_t source_piece = 24 << 20, target_piece = 40 << 20, length = ((size_t)5 << 30) + 4097;
    const size_t sources = length / source_piece + 2, targets = length / target_piece + 2;
    char address[256];
    te_engine *target = create_engine(), *initiator = create_engine();
    unsigned char *from = map_repeatedly(source_piece, sources), *to = map_repeatedly(target_piece, targets);
    te_transfer_result result;
    fill(from, source_piece, 1);
    OK(te_register_local_memory(target, to, targets * target_piece, NULL));
    OK(te_register_local_memory(target, from, sources * source_piece, NULL));
    OK(te_engine_address(target, address, sizeof address));
    OK(te_open_segment(initiator, address, &segment));
    te_transfer_request request = make_request(TE_WRITE, from + 1, segment, (uintptr_t)(to + 3), length);
    memset(&result, 0, sizeof result);
    OK(te_batch_transfer(initiator, &request, sizeof request, 1, NULL, &result, sizeof result));
    EXPECT(length, result.bytes);
    check_last_piece(to, 3, length, target_piece, from + 1);
    memset(to, 0, target_piece);
    request = make_request(TE_READ, to + 5, segment, (uintptr_t)(from + 7), length);
    OK(te_batch_transfer(initiator, &request, sizeof request, 1, NULL, &result, sizeof result));
    EXPECT(length, result.bytes);
    check_last_piece(to, 5, length, target_piece, from + 7);
    OK(te_engine_destroy(initiator));
    OK(te_engine_destroy(target));
    munmap(from, sources * source_piece);
    munmap(to, targets * target_piece);
}

int main(void) {
    lengths_around_powers_of_two_are_byte_exact_to_1_gib();
    lengths_beyond_4_gib_are_whole();
    return 0;
}
