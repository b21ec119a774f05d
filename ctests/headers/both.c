/* Both headers in one file, the older one first. */
#include <transfer_engine_c.h>

#include <te.h>

int use_both(transfer_engine_t engine);
int use_both(transfer_engine_t engine) { return te_engine_destroy((te_engine *)engine); }
