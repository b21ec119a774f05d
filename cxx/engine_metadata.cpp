// The engine is asked in each call; what is kept here are the objects that were handed out, one for each segment. It is handed out again as
// long as the engine says the same of the segment, whatever the program has done to the object meanwhile: programs sort its buffers.

#include "engine_metadata.h"

#include <transfer_engine_c.h>

#include <array>
#include <mutex>
#include <unordered_map>

#include "descriptor.h"
#include "metadata_source.h"
#include "results.h"

namespace mooncake::transfer_engine_cxx {

namespace {

class EngineMetadata final : public TransferMetadata::Source {
    using NotifyDesc = TransferMetadata::NotifyDesc;
    using RpcMetaDesc = TransferMetadata::RpcMetaDesc;
    using SegmentDesc = TransferMetadata::SegmentDesc;
    using SegmentID = TransferMetadata::SegmentID;

   public:
    explicit EngineMetadata(te_engine* engine) : engine_(engine) {
        std::array<char, 512> name;
        if (te_engine_address(engine, name.data(), name.size()) != 0) return;
        auto [host, port] = parseHostNameWithPort(name.data());
        address_ = {host, port, -1};
    }

    std::shared_ptr<SegmentDesc> by_name(const std::string& name, bool force_update) override {
        SegmentID segment = id(name);
        return segment == kNone ? nullptr : by_id(segment, force_update);
    }

    std::shared_ptr<SegmentDesc> by_id(SegmentID segment, bool force_update) override {
        std::shared_ptr<SegmentDesc> now = read(segment, force_update);
        std::lock_guard guard(lock_);
        if (!now) {
            segments_.erase(segment);
            return nullptr;
        }
        Segment& known = segments_[segment];
        if (!known.object || known.said != *now || known.said.tcp_proto_version != now->tcp_proto_version) {
            known.said = *now;
            known.object = std::move(now);
        }
        return known.object;
    }

    std::shared_ptr<SegmentDesc> fetch(const std::string& name) override {
        SegmentID segment = id(name);
        return segment == kNone ? nullptr : read(segment, true);
    }

    SegmentID id(const std::string& name) override {
        te_segment segment;
        return te_open_segment(engine_, name.c_str(), &segment) == 0 ? segment : kNone;
    }

    int sync(const std::string& name) override {
        if (name.empty()) return ::syncSegmentCache(engine_);
        // As for all of them, failing to ask is no failure: the former state is kept.
        ::openSegmentNoCache(engine_, name.c_str());
        return 0;
    }

    int forget(const std::string& name) override { return te_forget_segment(engine_, name.c_str()); }
    int publish(SegmentID segment) override { return segment == LOCAL_SEGMENT_ID ? te_publish(engine_) : ERR_INVALID_ARGUMENT; }
    // An engine has one name, and looks after it.
    int publish_address(const std::string&) override { return te_publish_address(engine_); }
    const RpcMetaDesc& local_address() const override { return address_; }

    int notify(const std::string& peer, const NotifyDesc& message, NotifyDesc& reply) override {
        reply = {};
        return te_notify_name(engine_, peer.c_str(), message.name.c_str(), message.notify_msg.c_str());
    }

    int take_notifications(std::vector<NotifyDesc>& messages) override {
        te_notification* list;
        size_t count;
        te_status taken = te_take_notifications(engine_, &list, &count);
        if (taken != 0) return taken;
        for (size_t i = 0; i < count; ++i) messages.push_back({list[i].name, list[i].message});
        te_free_notifications(list, count);
        return 0;
    }

    int probe(const std::string& peer) override { return te_probe(engine_, peer.c_str()); }

   private:
    static constexpr SegmentID kNone = UINT64_MAX;

    struct Segment {
        SegmentDesc said;
        std::shared_ptr<SegmentDesc> object;
    };

    std::shared_ptr<SegmentDesc> read(SegmentID segment, bool refresh) const {
        char* json = nullptr;
        te_status told = te_segment_json(engine_, segment, refresh, &json);
        return read_descriptor(take_text(told, json));
    }

    te_engine* const engine_;
    RpcMetaDesc address_;

    std::mutex lock_;
    std::unordered_map<SegmentID, Segment> segments_;
};

}  // namespace

std::shared_ptr<TransferMetadata> engine_metadata(te_engine* engine) {
    return std::make_shared<TransferMetadata>(std::make_unique<EngineMetadata>(engine));
}

}  // namespace mooncake::transfer_engine_cxx
