// The RPC classes of upstream's Python module are no part of the transfer engine. The module builds, and does not have them.
#pragma once

#include <pybind11/pybind11.h>

namespace mooncake {

inline void bind_rpc_interface(pybind11::module_&) {}

}  // namespace mooncake
