/* The other process of a two-process test: the program "peer", which registers memory and obeys orders on its standard input.
 * It dies with the test that started it. */
#ifndef PEER_H
#define PEER_H

#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <sys/types.h>

/* Layout of the peer's memory: offsets from its base. The first two regions touch; peers may not reach the private one. */
enum {
    PEER_FIRST = 0,
    PEER_FIRST_LENGTH = 1 << 20,
    PEER_SECOND = 1 << 20,
    PEER_SECOND_LENGTH = 1 << 20,
    PEER_GAP = 2 << 20,
    PEER_PRIVATE = (2 << 20) + (64 << 10),
    PEER_PRIVATE_LENGTH = 64 << 10,
    PEER_LARGE = 3 << 20,
    PEER_LARGE_LENGTH = 32 << 20,
    PEER_LENGTH = (3 << 20) + (32 << 20) + (64 << 10)
};

struct peer {
    pid_t pid;
    FILE *orders;
    FILE *answers;
    char address[256];
    uint64_t base;
};

/* Starts the peer and waits until it can be opened. */
void peer_start(struct peer *peer);

/* Sends one order and returns the answer's line, which stays valid until the next order. Ends the test if the peer is gone.
 *   sum OFFSET LENGTH           checksum() of that memory
 *   fill OFFSET LENGTH SEED     fills it by fill(); answers "done"
 *   register OFFSET LENGTH      answers the status
 *   unregister OFFSET           answers the status
 *   notify ADDRESS NAME TEXT    answers the status
 *   begin ADDRESS REMOTE LENGTH COUNT   starts COUNT transfers of LENGTH bytes with that memory of another engine, writes
 *                               from the first half of its large region and reads to its second in turn; answers the status at once
 *   take                        "NAME TEXT" of the oldest notification not yet told; waits for one up to 10 s, then "none" */
const char *peer_ask(struct peer *peer, const char *format, ...) __attribute__((format(printf, 2, 3)));

/* Closes the peer's input, waits for its end and checks that it ended well. */
void peer_end(struct peer *peer);

/* Stops it; when this returns no thread of it runs any more. */
void peer_stop(struct peer *peer);

/* Lets it run again. */
void peer_continue(struct peer *peer);

/* Kills it on the spot. */
void peer_kill(struct peer *peer);

/* Pseudo-random bytes, and the checksum (FNV-1a) of any. */
void fill(unsigned char *memory, size_t length, uint64_t seed);
uint64_t checksum(const unsigned char *memory, size_t length);

#endif
