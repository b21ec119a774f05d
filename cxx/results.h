// From the results of the C interface to those of the class.
#pragma once

#include <te.h>

#include "common/base/status.h"

namespace mooncake::transfer_engine_cxx {

// The status for the failure that a call of te.h has just returned on this thread, with its text.
Status failure(te_status status);

// The status for what a function of transfer_engine_c.h with positive errors has just returned on this thread.
Status from_positive(int code);

// The text that a call of te.h has given, which is freed; "" if the call has failed.
std::string take_text(te_status status, char* text);

}  // namespace mooncake::transfer_engine_cxx
