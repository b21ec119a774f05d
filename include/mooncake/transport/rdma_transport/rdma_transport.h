// Transports are reached through Transport alone; this name is here for programs that include it.
#pragma once

#include "transport/transport.h"
