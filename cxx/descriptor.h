// Descriptors in the JSON that engines and metadata servers keep.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <string_view>

#include "transfer_metadata.h"

namespace mooncake::transfer_engine_cxx {

// Null for a text that is no descriptor, or one of a protocol other than "tcp" and "rdma". What a descriptor does not say has the
// default value.
std::shared_ptr<TransferMetadata::SegmentDesc> read_descriptor(std::string_view json);

// With the time as its timestamp. Nothing for a protocol other than "tcp" and "rdma".
std::optional<std::string> write_descriptor(const TransferMetadata::SegmentDesc& descriptor);

std::optional<TransferMetadata::RpcMetaDesc> read_address(std::string_view json);
std::string write_address(const TransferMetadata::RpcMetaDesc& address);

std::optional<TransferMetadata::HandShakeDesc> read_handshake(std::string_view json);
std::string write_handshake(const TransferMetadata::HandShakeDesc& handshake);

std::optional<TransferMetadata::NotifyDesc> read_notification(std::string_view json);
std::string write_notification(const TransferMetadata::NotifyDesc& notification);

}  // namespace mooncake::transfer_engine_cxx
