/* transfer_engine_c.h stands on its own, in every dialect that may include it, and may be included twice. */
#include <transfer_engine_c.h>
#include <transfer_engine_c.h>

/* Its names for numbers are macros, as upstream's. */
#if !defined(segment_handle_t) || !defined(segment_id_t) || !defined(batch_id_t) || !defined(LOCAL_SEGMENT) || \
    !defined(INVALID_BATCH) || !defined(OPCODE_READ) || !defined(OPCODE_WRITE) || !defined(STATUS_WAITING) ||  \
    !defined(STATUS_PENDING) || !defined(STATUS_INVALID) || !defined(STATUS_CANCELED) ||                       \
    !defined(STATUS_COMPLETED) || !defined(STATUS_TIMEOUT) || !defined(STATUS_FAILED)
#error "a macro of upstream's header is missing"
#endif

int use_mooncake(void);
int use_mooncake(void) {
    static struct transfer_request request;
    static transfer_status_t status;
    batch_id_t batch = INVALID_BATCH;
    segment_handle_t segment = LOCAL_SEGMENT;
    request.opcode = OPCODE_WRITE;
    request.target_id = segment;
    return status.status == STATUS_WAITING && batch != 0 && request.length == 0;
}
