// The metadata of an engine.
#pragma once

#include <te.h>

#include <memory>

#include "transfer_metadata.h"

namespace mooncake::transfer_engine_cxx {

// It may outlive the engine, and fails then.
std::shared_ptr<TransferMetadata> engine_metadata(te_engine* engine);

}  // namespace mooncake::transfer_engine_cxx
