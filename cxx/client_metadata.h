// Metadata without an engine.
#pragma once

#include <memory>
#include <string>

#include "metadata_source.h"

namespace mooncake::transfer_engine_cxx {

// A client of a metadata server, or with P2PHANDSHAKE of peers. Throws std::runtime_error if there is no such kind of server.
std::unique_ptr<TransferMetadata::Source> client_metadata(const std::string& conn_string);

}  // namespace mooncake::transfer_engine_cxx
