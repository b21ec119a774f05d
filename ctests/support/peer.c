#include "peer.h"

#include <errno.h>
#include <inttypes.h>
#include <signal.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include "check.h"

void fill(unsigned char *memory, size_t length, uint64_t seed) {
    uint64_t state = seed * 0x9E3779B97F4A7C15u + 1;
    for (size_t i = 0; i < length; i++) {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        memory[i] = (unsigned char)(state >> 32);
    }
}

uint64_t checksum(const unsigned char *memory, size_t length) {
    uint64_t sum = 0xcbf29ce484222325u;
    for (size_t i = 0; i < length; i++) sum = (sum ^ memory[i]) * 0x100000001b3u;
    return sum;
}

static void read_line(struct peer *peer, char *line, size_t size) {
    if (fgets(line, (int)size, peer->answers) == NULL) {
        fprintf(stderr, "the peer has ended\n");
        exit(1);
    }
    line[strcspn(line, "\n")] = '\0';
}

void peer_start(struct peer *peer) {
    int orders[2], answers[2];
    CHECK(pipe(orders) == 0 && pipe(answers) == 0);
    pid_t parent = getpid();
    peer->pid = fork();
    CHECK(peer->pid >= 0);
    if (peer->pid == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        if (getppid() != parent) _exit(1);
        dup2(orders[0], STDIN_FILENO);
        dup2(answers[1], STDOUT_FILENO);
        for (int fd = 3; fd < 64; fd++) close(fd);
        execl(PEER_PROGRAM, PEER_PROGRAM, (char *)NULL);
        _exit(127);
    }
    close(orders[0]);
    close(answers[1]);
    peer->orders = fdopen(orders[1], "w");
    peer->answers = fdopen(answers[0], "r");
    char line[512];
    read_line(peer, line, sizeof line);
    CHECK(sscanf(line, "%255s %" SCNu64, peer->address, &peer->base) == 2);
}

const char *peer_ask(struct peer *peer, const char *format, ...) {
    static char answer[4096];
    va_list arguments;
    va_start(arguments, format);
    vfprintf(peer->orders, format, arguments);
    va_end(arguments);
    fputc('\n', peer->orders);
    fflush(peer->orders);
    read_line(peer, answer, sizeof answer);
    return answer;
}

void peer_end(struct peer *peer) {
    int status;
    fclose(peer->orders);
    CHECK(waitpid(peer->pid, &status, 0) == peer->pid);
    fclose(peer->answers);
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

void peer_stop(struct peer *peer) {
    int status;
    CHECK(kill(peer->pid, SIGSTOP) == 0);
    CHECK(waitpid(peer->pid, &status, WUNTRACED) == peer->pid);
    CHECK(WIFSTOPPED(status));
}

void peer_continue(struct peer *peer) { CHECK(kill(peer->pid, SIGCONT) == 0); }

void peer_kill(struct peer *peer) {
    kill(peer->pid, SIGKILL);
    CHECK(waitpid(peer->pid, NULL, 0) == peer->pid);
    fclose(peer->orders);
    fclose(peer->answers);
}
