/* Plain sockets that speak the protocols of the engine, or misuse them. */
#ifndef WIRE_H
#define WIRE_H

#include <stddef.h>
#include <stdint.h>

enum { HEADER = 24 };

/* Opcodes of the data protocol; add VERSION_2 for its second version. */
enum { WIRE_READ = 0, WIRE_WRITE = 1, VERSION_2 = 0x80 };

/* Seconds since some moment. */
double now(void);

/* Listens on a free port of loopback. */
int listen_somewhere(int *port);

/* Connects to a port of loopback. Receiving ends after 10 s. -1 if it is refused. */
int try_to_connect(int port);

/* The same; ends the test if it is refused. */
int connect_to(int port);

/* Does not wait for the connection. */
int start_to_connect(int port);

/* Closing will reset the connection. */
void reset_on_close(int fd);

/* Whether that many bytes came. */
int receive_all(int fd, void *bytes, size_t length);

/* Sends as much as the other side takes; it may be gone. */
void send_all(int fd, const void *bytes, size_t length);

/* Port of the data protocol of the engine of that address, which is asked for it as peers do. */
int find_data_port(const char *address);

/* A request of the data protocol. */
void put_header(unsigned char *header, uint64_t length, uint64_t address, int opcode);

#endif
