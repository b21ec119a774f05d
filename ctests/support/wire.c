#define _GNU_SOURCE
#include "wire.h"

#include <arpa/inet.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#include "check.h"

double now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec + (double)time.tv_nsec / 1e9;
}

static struct sockaddr_in loopback(int port) {
    struct sockaddr_in address;
    memset(&address, 0, sizeof address);
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    address.sin_port = htons((uint16_t)port);
    return address;
}

int listen_somewhere(int *port) {
    struct sockaddr_in address = loopback(0);
    socklen_t size = sizeof address;
    int fd = socket(AF_INET, SOCK_STREAM, 0);
    CHECK(bind(fd, (struct sockaddr *)&address, sizeof address) == 0 && listen(fd, 64) == 0);
    CHECK(getsockname(fd, (struct sockaddr *)&address, &size) == 0);
    *port = ntohs(address.sin_port);
    return fd;
}

int try_to_connect(int port) {
    struct sockaddr_in address = loopback(port);
    struct timeval limit = {10, 0};
    int fd = socket(AF_INET, SOCK_STREAM, 0);
    if (fd < 0) return -1;
    if (connect(fd, (struct sockaddr *)&address, sizeof address) != 0) {
        close(fd);
        return -1;
    }
    setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit);
    return fd;
}

int connect_to(int port) {
    int fd = try_to_connect(port);
    CHECK(fd >= 0);
    return fd;
}

int start_to_connect(int port) {
    struct sockaddr_in address = loopback(port);
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK, 0);
    if (fd >= 0 && connect(fd, (struct sockaddr *)&address, sizeof address) != 0) CHECK(errno == EINPROGRESS || errno == ECONNREFUSED);
    return fd;
}

void reset_on_close(int fd) {
    static const struct linger reset = {1, 0};
    CHECK(setsockopt(fd, SOL_SOCKET, SO_LINGER, &reset, sizeof reset) == 0);
}

int receive_all(int fd, void *bytes, size_t length) {
    return length == 0 || recv(fd, bytes, length, MSG_WAITALL) == (ssize_t)length;
}

void send_all(int fd, const void *bytes, size_t length) {
    if (send(fd, bytes, length, MSG_NOSIGNAL) < 0) return;
}

int find_data_port(const char *address) {
    static char reply[1 << 16];
    int fd = connect_to(atoi(strrchr(address, ':') + 1));
    CHECK(send(fd, "\3\0\0\0\0\0\0\0\1{}", 11, MSG_NOSIGNAL) == 11);
    uint64_t length;
    CHECK(receive_all(fd, &length, sizeof length) && length < sizeof reply && receive_all(fd, reply, length));
    close(fd);
    char *found = strstr(reply, "\"tcp_data_port\":");
    CHECK(found != NULL);
    return atoi(found + strlen("\"tcp_data_port\":"));
}

void put_header(unsigned char *header, uint64_t length, uint64_t address, int opcode) {
    memset(header, 0, HEADER);
    memcpy(header, &length, 8);
    memcpy(header + 8, &address, 8);
    header[16] = (unsigned char)opcode;
}
