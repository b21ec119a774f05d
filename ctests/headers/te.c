/* te.h stands on its own, in every dialect that may include it, and may be included twice. */
#include <te.h>
#include <te.h>

int use_te(void);
int use_te(void) {
    static te_transfer_request request;
    request.opcode = TE_WRITE;
    return te_version() != 0 && request.segment == TE_LOCAL_SEGMENT && TE_STATE_COMPLETED == 4;
}
