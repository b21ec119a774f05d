#include "child.h"

#include <dirent.h>
#include <sys/wait.h>
#include <unistd.h>

#include "check.h"

void in_child(void (*body)(void *), void *argument) {
    /* Told through a pipe: what only threads of the parent knew of is lost in the child, so valgrind changes its exit code. */
    int verdict[2];
    char said = 0;
    CHECK(pipe(verdict) == 0);
    pid_t child = fork();
    CHECK(child >= 0);
    if (child == 0) {
        alarm(60);
        close(verdict[0]);
        body(argument);
        CHECK(write(verdict[1], "+", 1) == 1);
        _exit(0);
    }
    close(verdict[1]);
    CHECK(read(verdict[0], &said, 1) == 1 && said == '+');
    close(verdict[0]);
    CHECK(waitpid(child, NULL, 0) == child);
}

int count_entries(const char *directory) {
    int count = 0;
    DIR *entries = opendir(directory);
    CHECK(entries != NULL);
    while (readdir(entries) != NULL) count++;
    closedir(entries);
    return count;
}

void expect_entries(int expected, const char *directory) {
    for (int i = 0; i < 5000 && count_entries(directory) != expected; i++) usleep(1000);
    EXPECT(expected, count_entries(directory));
}

void expect_at_most_entries(int limit, const char *directory) {
    for (int i = 0; i < 5000 && count_entries(directory) > limit; i++) usleep(1000);
    if (count_entries(directory) > limit) EXPECT(limit, count_entries(directory));
}

long resident_kilobytes(void) {
    long total, resident;
    FILE *file = fopen("/proc/self/statm", "r");
    CHECK(file != NULL && fscanf(file, "%ld %ld", &total, &resident) == 2);
    fclose(file);
    return resident * (sysconf(_SC_PAGESIZE) / 1024);
}
