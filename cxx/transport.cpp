#include "transport/transport.h"

namespace mooncake {

Transport::~Transport() = default;

}  // namespace mooncake
