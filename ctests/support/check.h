/* Checks that end the test with the place and the library's own words. */
#ifndef CHECK_H
#define CHECK_H

#include <stdio.h>
#include <stdlib.h>
#include <te.h>

#define CHECK(condition)                                                                                     \
    do {                                                                                                     \
        if (!(condition)) {                                                                                  \
            fprintf(stderr, "%s:%d: %s\n  last error: %s\n", __FILE__, __LINE__, #condition, te_last_error()); \
            exit(1);                                                                                         \
        }                                                                                                    \
    } while (0)

/* The call returns exactly this number. */
#define EXPECT(expected, call)                                                                                           \
    do {                                                                                                                 \
        long long got_ = (long long)(call), expected_ = (long long)(expected);                                           \
        if (got_ != expected_) {                                                                                         \
            fprintf(stderr, "%s:%d: %s\n  is %lld, not %lld; last error: %s\n", __FILE__, __LINE__, #call, got_, expected_, \
                    te_last_error());                                                                                    \
            exit(1);                                                                                                     \
        }                                                                                                                \
    } while (0)

#define OK(call) EXPECT(0, call)

/* The call fails with a negative status and a text. */
#define REFUSED(call)           \
    do {                        \
        CHECK((call) < 0);      \
        CHECK(*te_last_error()); \
    } while (0)

#endif
