// Programs include this header for what it brings in; the choice among transports is the engine's own.
#pragma once

#include "transport/transport.h"
