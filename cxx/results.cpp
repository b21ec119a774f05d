#include "results.h"

namespace mooncake::transfer_engine_cxx {

Status failure(te_status status) {
    using Code = Status::Code;
    Code code = Code::kContext;
    switch (status) {
        case TE_OK: return Status::OK();
        case TE_ERR_INVALID_HANDLE: code = Code::kInvalidArgument; break;
        case TE_ERR_NOT_SUPPORTED_TRANSPORT: code = Code::kNotSupportedTransport; break;
        case TE_ERR_NOT_IMPLEMENTED: code = Code::kNotImplemented; break;
        default:
            // Numbers of this interface down to -302 are the codes, negated; those below -1000 have none. Running out of time
            // is among these: Clock says that a wait has ended, which no failed transfer may say.
            if (status > -1000) code = static_cast<Code>(-status);
    }
    return {code, te_last_error()};
}

Status from_positive(int code) {
    if (code == 0) return Status::OK();
    return {static_cast<Status::Code>(code < 0 ? -code : code), te_last_error()};
}

std::string take_text(te_status status, char* text) {
    if (status != 0 || !text) return "";
    std::string copy(text);
    te_free_text(text);
    return copy;
}

}  // namespace mooncake::transfer_engine_cxx
