// Where the metadata of a TransferMetadata comes from: an engine, or a metadata server and peers.
#pragma once

#include "transfer_metadata.h"

namespace mooncake {

// The functions of TransferMetadata. Those that put a descriptor together are for a source that keeps one of its own.
class __attribute__((visibility("hidden"))) TransferMetadata::Source {
   public:
    virtual ~Source() = default;

    virtual std::shared_ptr<SegmentDesc> by_name(const std::string& name, bool force_update) = 0;
    virtual std::shared_ptr<SegmentDesc> by_id(SegmentID id, bool force_update) = 0;
    virtual std::shared_ptr<SegmentDesc> fetch(const std::string& name) = 0;
    virtual SegmentID id(const std::string& name) = 0;
    virtual int sync(const std::string& name) = 0;
    virtual int forget(const std::string& name) = 0;
    virtual int publish(SegmentID id) = 0;
    virtual int publish_address(const std::string& name) = 0;
    virtual const RpcMetaDesc& local_address() const = 0;
    virtual int notify(const std::string& peer, const NotifyDesc& message, NotifyDesc& reply) = 0;
    virtual int take_notifications(std::vector<NotifyDesc>& messages) = 0;
    virtual int probe(const std::string& peer) = 0;

    virtual int publish_as(const std::string&, const SegmentDesc&) { return ERR_NOT_IMPLEMENTED; }
    virtual int add_segment(SegmentID, const std::string&, std::shared_ptr<SegmentDesc>&&) { return ERR_NOT_IMPLEMENTED; }
    virtual int remove_segment(const std::string&) { return ERR_NOT_IMPLEMENTED; }
    virtual int add_buffer(const BufferDesc&, bool) { return ERR_NOT_IMPLEMENTED; }
    virtual int remove_buffer(void*, bool) { return ERR_NOT_IMPLEMENTED; }
    virtual int add_address(const std::string&, RpcMetaDesc&) { return ERR_NOT_IMPLEMENTED; }
    virtual int remove_address(const std::string&) { return ERR_NOT_IMPLEMENTED; }
    virtual int address(const std::string&, RpcMetaDesc&) { return ERR_NOT_IMPLEMENTED; }
    virtual int serve(OnReceiveHandShake, uint16_t, int) { return ERR_NOT_IMPLEMENTED; }
    virtual int handshake(const std::string&, const HandShakeDesc&, HandShakeDesc&) { return ERR_NOT_IMPLEMENTED; }
};

}  // namespace mooncake
