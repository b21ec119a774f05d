// The class hands each call on to its source: engine_metadata.cpp or client_metadata.cpp.
#include "transfer_metadata.h"

#include <iostream>

#include "client_metadata.h"
#include "descriptor.h"
#include "metadata_source.h"

namespace mooncake {

bool TransferMetadata::SegmentDesc::operator==(const SegmentDesc& other) const {
    return name == other.name && protocol == other.protocol && devices == other.devices && topology == other.topology &&
           buffers == other.buffers && nvmeof_buffers == other.nvmeof_buffers && cxl_name == other.cxl_name &&
           cxl_base_addr == other.cxl_base_addr && rank_info == other.rank_info && tcp_data_port == other.tcp_data_port &&
           rdma_server_name == other.rdma_server_name;
}

void TransferMetadata::SegmentDesc::dump() const {
    std::cerr << "segment " << name << ": " << transfer_engine_cxx::write_descriptor(*this).value_or("protocol " + protocol) << '\n';
}

TransferMetadata::TransferMetadata(const std::string& conn_string)
    : TransferMetadata(transfer_engine_cxx::client_metadata(conn_string)) {}
TransferMetadata::TransferMetadata(std::unique_ptr<Source> source) : source_(std::move(source)) {}
TransferMetadata::~TransferMetadata() = default;

std::shared_ptr<TransferMetadata::SegmentDesc> TransferMetadata::getSegmentDescByName(const std::string& segment_name,
                                                                                      bool force_update) {
    return source_->by_name(segment_name, force_update);
}

std::shared_ptr<TransferMetadata::SegmentDesc> TransferMetadata::getSegmentDescByID(SegmentID segment_id, bool force_update) {
    return source_->by_id(segment_id, force_update);
}

std::shared_ptr<TransferMetadata::SegmentDesc> TransferMetadata::getSegmentDesc(const std::string& segment_name) {
    return source_->fetch(segment_name);
}

TransferMetadata::SegmentID TransferMetadata::getSegmentID(const std::string& segment_name) { return source_->id(segment_name); }

int TransferMetadata::updateLocalSegmentDesc(SegmentID segment_id) { return source_->publish(segment_id); }

int TransferMetadata::updateSegmentDesc(const std::string& segment_name, const SegmentDesc& desc) {
    return source_->publish_as(segment_name, desc);
}

int TransferMetadata::syncSegmentCache(const std::string& segment_name) { return source_->sync(segment_name); }

int TransferMetadata::removeSegmentDesc(const std::string& segment_name) { return source_->forget(segment_name); }

int TransferMetadata::addLocalSegment(SegmentID segment_id, const std::string& segment_name, std::shared_ptr<SegmentDesc>&& desc) {
    return source_->add_segment(segment_id, segment_name, std::move(desc));
}

int TransferMetadata::removeLocalSegment(const std::string& segment_name) { return source_->remove_segment(segment_name); }

int TransferMetadata::addLocalMemoryBuffer(const BufferDesc& buffer_desc, bool update_metadata) {
    return source_->add_buffer(buffer_desc, update_metadata);
}

int TransferMetadata::removeLocalMemoryBuffer(void* addr, bool update_metadata) { return source_->remove_buffer(addr, update_metadata); }

int TransferMetadata::addRpcMetaEntry(const std::string& server_name, RpcMetaDesc& desc) {
    return source_->add_address(server_name, desc);
}

int TransferMetadata::removeRpcMetaEntry(const std::string& server_name) { return source_->remove_address(server_name); }

int TransferMetadata::rePublishRpcMetaEntry(const std::string& server_name) { return source_->publish_address(server_name); }

int TransferMetadata::getRpcMetaEntry(const std::string& server_name, RpcMetaDesc& desc) { return source_->address(server_name, desc); }

const TransferMetadata::RpcMetaDesc& TransferMetadata::localRpcMeta() const { return source_->local_address(); }

int TransferMetadata::startHandshakeDaemon(OnReceiveHandShake on_receive_handshake, uint16_t listen_port, int sockfd) {
    return source_->serve(std::move(on_receive_handshake), listen_port, sockfd);
}

int TransferMetadata::sendHandshake(const std::string& peer_server_name, const HandShakeDesc& local_desc, HandShakeDesc& peer_desc) {
    return source_->handshake(peer_server_name, local_desc, peer_desc);
}

int TransferMetadata::sendNotify(const std::string& peer_server_name, const NotifyDesc& local_desc, NotifyDesc& peer_desc) {
    return source_->notify(peer_server_name, local_desc, peer_desc);
}

int TransferMetadata::getNotifies(std::vector<NotifyDesc>& notifies) { return source_->take_notifications(notifies); }

int TransferMetadata::sendProbe(const std::string& peer_server_name) { return source_->probe(peer_server_name); }

}  // namespace mooncake
