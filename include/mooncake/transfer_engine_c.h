// The C interface, for programs that look for all headers in this directory.
#pragma once

#include "../transfer_engine_c.h"
