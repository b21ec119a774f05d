/* Parts of a test that need a process of their own, with another environment, other limits, or an engine that was inherited; and what
 * a process uses. */
#ifndef CHILD_H
#define CHILD_H

/* Runs the body in a child made by fork() and checks that it came to its end. A child that hangs is ended after 60 s.
 * Waits up to 5 s until all other threads of this process sleep. */
void in_child(void (*body)(void *), void *argument);

/* The number of entries of a directory such as /proc/self/fd. */
int count_entries(const char *directory);

/* Waits up to 60 s until it has that many entries: threads are gone from /proc a moment after they were joined, and looking a name up cannot
 * be cut short. */
void expect_entries(int expected, const char *directory);

/* Waits up to 60 s until it has at most that many entries: what peers have ended goes a moment later. */
void expect_at_most_entries(int limit, const char *directory);

/* Memory of this process that is in use now, in KiB. */
long resident_kilobytes(void);

#endif
