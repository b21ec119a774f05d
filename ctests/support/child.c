#include "child.h"

#include <dirent.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include "check.h"

/* Whether a thread of this process, given by its number in text, sleeps or is gone. */
static int sleeps(const char *thread) {
    char path[64], line[512] = "";
    snprintf(path, sizeof path, "/proc/self/task/%s/stat", thread);
    FILE *file = fopen(path, "r");
    if (file == NULL) return 1;
    size_t length = fread(line, 1, sizeof line - 1, file);
    fclose(file);
    line[length] = 0;
    /* After the name, which may hold anything. */
    const char *name_end = strrchr(line, ')');
    return name_end == NULL || name_end[1] == 0 || name_end[2] == 'S';
}

static int others_sleep(void) {
    int all = 1;
    DIR *threads = opendir("/proc/self/task");
    CHECK(threads != NULL);
    for (struct dirent *entry; (entry = readdir(threads)) != NULL;)
        if (entry->d_name[0] != '.' && atol(entry->d_name) != syscall(SYS_gettid)) all = all && sleeps(entry->d_name);
    closedir(threads);
    return all;
}

void in_child(void (*body)(void *), void *argument) {
    /* The sanitizers of GCC 12 keep the locks of their allocators over a fork(): one that another thread holds stays locked in the child. */
    for (int i = 0; i < 5000 && !others_sleep(); i++) usleep(1000);
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
    for (int i = 0; i < 60000 && count_entries(directory) != expected; i++) usleep(1000);
    EXPECT(expected, count_entries(directory));
}

void expect_at_most_entries(int limit, const char *directory) {
    for (int i = 0; i < 60000 && count_entries(directory) > limit; i++) usleep(1000);
    if (count_entries(directory) > limit) EXPECT(limit, count_entries(directory));
}

long resident_kilobytes(void) {
    long total, resident;
    FILE *file = fopen("/proc/self/statm", "r");
    CHECK(file != NULL && fscanf(file, "%ld %ld", &total, &resident) == 2);
    fclose(file);
    return resident * (sysconf(_SC_PAGESIZE) / 1024);
}
