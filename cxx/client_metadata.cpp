// Descriptors that are known here have numbers: 0 is this client's own, others from 1 on. They have names without leading '/', one or
// more. A descriptor is not changed once it is here; another takes its place. Locks: `lock_`, around what is known, and never while a
// server or a peer is asked; `server_lock_`, around starting the server. Handshakes are answered on the thread of the server, without a
// lock while the program's function runs.

#include "client_metadata.h"

#include <poll.h>

#include <algorithm>
#include <climits>
#include <cstdlib>
#include <mutex>
#include <optional>
#include <unordered_map>

#include "config.h"
#include "descriptor.h"
#include "handshake.h"
#include "store.h"

namespace mooncake::transfer_engine_cxx {

namespace {

class ClientMetadata final : public TransferMetadata::Source {
    using BufferDesc = TransferMetadata::BufferDesc;
    using HandShakeDesc = TransferMetadata::HandShakeDesc;
    using NotifyDesc = TransferMetadata::NotifyDesc;
    using OnReceiveHandShake = TransferMetadata::OnReceiveHandShake;
    using RpcMetaDesc = TransferMetadata::RpcMetaDesc;
    using SegmentDesc = TransferMetadata::SegmentDesc;
    using SegmentID = TransferMetadata::SegmentID;

   public:
    explicit ClientMetadata(const std::string& conn_string) : caches_(globalConfig().metacache) {
        if (conn_string != P2PHANDSHAKE) store_ = std::make_unique<Store>(conn_string);
        if (const char* cluster = std::getenv("MC_METADATA_CLUSTER_ID"); cluster && *cluster) {
            prefix_ += cluster;
            if (!prefix_.ends_with('/')) prefix_ += '/';
        }
        std::chrono::seconds interval(globalConfig().te_metadata_refresh_interval_seconds);
        if (caches_ && interval.count() > 0) refresher_.emplace(*this, interval);
    }

    std::shared_ptr<SegmentDesc> by_name(const std::string& given, bool force_update) override {
        const std::string name = without_slashes(given);
        {
            std::lock_guard guard(lock_);
            auto known = ids_.find(name);
            if (known != ids_.end() && (known->second == LOCAL_SEGMENT_ID || (caches_ && !force_update))) {
                return segments_.at(known->second);
            }
        }
        std::shared_ptr<SegmentDesc> descriptor = fetch(name);
        return descriptor ? (keep(name, descriptor), descriptor) : nullptr;
    }

    std::shared_ptr<SegmentDesc> by_id(SegmentID id, bool force_update) override {
        std::string name;
        {
            std::lock_guard guard(lock_);
            auto known = segments_.find(id);
            if (known == segments_.end()) return nullptr;
            if (id == LOCAL_SEGMENT_ID || (caches_ && !force_update)) return known->second;
            name = known->second->name;
        }
        std::shared_ptr<SegmentDesc> descriptor = fetch(name);
        if (!descriptor) return nullptr;
        std::lock_guard guard(lock_);
        auto known = segments_.find(id);
        if (known != segments_.end()) known->second = descriptor;
        return descriptor;
    }

    std::shared_ptr<SegmentDesc> fetch(const std::string& name) override {
        if (store_) return read_descriptor(store_->get(segment_key(name)).value_or(""));
        auto [host, port] = parseHostNameWithPort(without_slashes(name));
        std::string reply;
        if (exchange(host, port, HandShakeRequestType::Metadata, "{}", reply) != 0) return nullptr;
        return read_descriptor(reply);
    }

    SegmentID id(const std::string& given) override {
        const std::string name = without_slashes(given);
        {
            std::lock_guard guard(lock_);
            auto known = ids_.find(name);
            if (known != ids_.end()) return known->second;
        }
        std::shared_ptr<SegmentDesc> descriptor = fetch(name);
        return descriptor ? keep(name, descriptor) : static_cast<SegmentID>(-1);
    }

    int sync(const std::string& given) override {
        const std::string name = without_slashes(given);
        std::vector<SegmentID> ids;
        {
            std::lock_guard guard(lock_);
            for (auto& [known, id] : ids_) {
                if (id != LOCAL_SEGMENT_ID && (name.empty() || name == known)) ids.push_back(id);
            }
        }
        for (SegmentID id : ids) by_id(id, true);
        return 0;
    }

    int forget(const std::string& name) override {
        std::string bare = without_slashes(name);
        if (bare.empty()) return ERR_INVALID_ARGUMENT;
        std::lock_guard guard(lock_);
        auto known = ids_.find(bare);
        if (known == ids_.end()) return 0;
        const SegmentID id = known->second;
        ids_.erase(known);
        // A descriptor goes with the last of its names.
        if (std::ranges::none_of(ids_, [id](const auto& other) { return other.second == id; })) segments_.erase(id);
        return 0;
    }

    int publish(SegmentID id) override {
        std::shared_ptr<SegmentDesc> descriptor = own(id);
        return descriptor ? publish_as(descriptor->name, *descriptor) : ERR_METADATA;
    }

    int publish_as(const std::string& name, const SegmentDesc& descriptor) override {
        if (!store_) return 0;
        std::optional<std::string> text = write_descriptor(descriptor);
        return text && store_->put(segment_key(name), *text) ? 0 : ERR_METADATA;
    }

    int add_segment(SegmentID id, const std::string& name, std::shared_ptr<SegmentDesc>&& descriptor) override {
        if (!descriptor) return ERR_INVALID_ARGUMENT;
        std::lock_guard guard(lock_);
        // A copy of the pointer: callers go on using theirs.
        segments_[id] = descriptor;
        ids_[without_slashes(name)] = id;
        next_id_ = std::max(next_id_, id + 1);
        return 0;
    }

    int remove_segment(const std::string& name) override {
        int forgotten = forget(name);
        if (forgotten != 0 || !store_) return forgotten;
        return store_->remove(segment_key(name)) ? 0 : ERR_METADATA;
    }

    int add_buffer(const BufferDesc& buffer, bool update_metadata) override {
        return change(update_metadata, [&](SegmentDesc& descriptor) {
            descriptor.buffers.push_back(buffer);
            return 0;
        });
    }

    int remove_buffer(void* addr, bool update_metadata) override {
        return change(update_metadata, [&](SegmentDesc& descriptor) {
            auto removed = std::erase_if(descriptor.buffers, [addr](const BufferDesc& buffer) {
                return buffer.addr == reinterpret_cast<uintptr_t>(addr);
            });
            return removed > 0 ? 0 : ERR_ADDRESS_NOT_REGISTERED;
        });
    }

    int add_address(const std::string& name, RpcMetaDesc& address) override {
        {
            std::lock_guard guard(lock_);
            address_ = address;
        }
        if (!store_) return listen(address.rpc_port, address.sockfd);
        return store_->put(address_key(name), write_address(address)) ? 0 : ERR_METADATA;
    }

    int remove_address(const std::string& name) override {
        if (!store_) return 0;
        return store_->remove(address_key(name)) ? 0 : ERR_METADATA;
    }

    int publish_address(const std::string& name) override {
        if (!store_) return 0;
        RpcMetaDesc own;
        {
            std::lock_guard guard(lock_);
            own = address_;
        }
        if (own.ip_or_host_name.empty()) return ERR_METADATA;
        RpcMetaDesc there;
        bool is_there = address(name, there) == 0 && there.ip_or_host_name == own.ip_or_host_name && there.rpc_port == own.rpc_port;
        return is_there || store_->put(address_key(name), write_address(own)) ? 0 : ERR_METADATA;
    }

    int address(const std::string& name, RpcMetaDesc& address) override {
        if (!store_) {
            auto [host, port] = parseHostNameWithPort(name);
            address = {host, port, -1};
            return 0;
        }
        std::optional<RpcMetaDesc> found = read_address(store_->get(address_key(name)).value_or(""));
        if (!found) return ERR_METADATA;
        address = *found;
        return 0;
    }

    const RpcMetaDesc& local_address() const override { return address_; }

    int serve(OnReceiveHandShake on_receive_handshake, uint16_t port, int sockfd) override {
        {
            std::lock_guard guard(lock_);
            on_receive_handshake_ = std::move(on_receive_handshake);
        }
        return listen(port, sockfd);
    }

    int handshake(const std::string& peer, const HandShakeDesc& request, HandShakeDesc& reply) override {
        std::string text;
        int asked = ask(peer, HandShakeRequestType::Connection, write_handshake(request), text);
        if (asked != 0) return asked;
        std::optional<HandShakeDesc> answer = read_handshake(text);
        if (!answer) return ERR_MALFORMED_JSON;
        reply = std::move(*answer);
        return reply.reply_msg.empty() ? 0 : ERR_METADATA;
    }

    int notify(const std::string& peer, const NotifyDesc& message, NotifyDesc& reply) override {
        std::string text;
        int asked = ask(peer, HandShakeRequestType::Notify, write_notification(message), text);
        if (asked != 0) return asked;
        std::optional<NotifyDesc> answer = read_notification(text);
        if (!answer) return ERR_MALFORMED_JSON;
        reply = std::move(*answer);
        return reply.notify_msg.empty() ? ERR_METADATA : 0;
    }

    int take_notifications(std::vector<NotifyDesc>& messages) override {
        std::lock_guard guard(lock_);
        std::move(notifications_.begin(), notifications_.end(), std::back_inserter(messages));
        notifications_.clear();
        return 0;
    }

    int probe(const std::string& peer) override {
        std::string reply;
        return ask(peer, HandShakeRequestType::Probe, "{}", reply);
    }

   private:
    static std::string without_slashes(const std::string& name) {
        size_t begin = name.find_first_not_of('/');
        return begin == name.npos ? "" : name.substr(begin);
    }

    std::string segment_key(const std::string& name) const {
        std::string bare = without_slashes(name);
        return prefix_ + (bare.find('/') == bare.npos ? "ram/" : "") + bare;
    }
    std::string address_key(const std::string& name) const { return prefix_ + "rpc_meta/" + name; }

    SegmentID keep(const std::string& name, std::shared_ptr<SegmentDesc> descriptor) {
        std::lock_guard guard(lock_);
        auto [entry, is_new] = ids_.try_emplace(name, next_id_);
        next_id_ += is_new;
        segments_[entry->second] = std::move(descriptor);
        return entry->second;
    }

    std::shared_ptr<SegmentDesc> own(SegmentID id) {
        std::lock_guard guard(lock_);
        auto known = segments_.find(id);
        return known == segments_.end() ? nullptr : known->second;
    }

    // Puts a changed copy in the place of the own descriptor, so that who holds it goes on seeing what it was.
    template <class Change>
    int change(bool update_metadata, Change make) {
        {
            std::lock_guard guard(lock_);
            auto known = segments_.find(LOCAL_SEGMENT_ID);
            if (known == segments_.end()) return ERR_METADATA;
            auto changed = std::make_shared<SegmentDesc>(*known->second);
            int made = make(*changed);
            if (made != 0) return made;
            known->second = std::move(changed);
        }
        return update_metadata ? publish(LOCAL_SEGMENT_ID) : 0;
    }

    int listen(uint16_t port, int sockfd) {
        std::lock_guard guard(server_lock_);
        if (!server_) {
            server_ = HandshakeServer::start(port, sockfd, [this](auto type, auto& request) { return answer(type, request); });
        }
        return server_ ? 0 : ERR_SOCKET;
    }

    int ask(const std::string& peer, HandShakeRequestType type, const std::string& request, std::string& reply) {
        RpcMetaDesc there;
        int found = address(peer, there);
        return found != 0 ? found : exchange(there.ip_or_host_name, there.rpc_port, type, request, reply);
    }

    std::optional<std::string> answer(HandShakeRequestType type, const std::string& request) {
        const std::string none = "null\n";
        switch (type) {
            case HandShakeRequestType::Connection:
            case HandShakeRequestType::OldProtocol: {
                std::optional<HandShakeDesc> peer = read_handshake(request);
                OnReceiveHandShake on_receive_handshake;
                {
                    std::lock_guard guard(lock_);
                    on_receive_handshake = on_receive_handshake_;
                }
                if (!peer) return std::nullopt;
                if (!on_receive_handshake) return none;
                HandShakeDesc reply;
                int result = on_receive_handshake(*peer, reply);
                if (result != 0 && reply.reply_msg.empty()) reply.reply_msg = "the handshake was refused with " + std::to_string(result);
                return write_handshake(reply) + '\n';
            }
            case HandShakeRequestType::Metadata: {
                std::shared_ptr<SegmentDesc> descriptor = store_ ? nullptr : own(LOCAL_SEGMENT_ID);
                std::optional<std::string> text = descriptor ? write_descriptor(*descriptor) : std::nullopt;
                return text ? *text + '\n' : none;
            }
            case HandShakeRequestType::Notify: {
                std::optional<NotifyDesc> message = read_notification(request);
                if (!message) return std::nullopt;
                std::lock_guard guard(lock_);
                notifications_.push_back(std::move(*message));
                return write_notification({"", "success"}) + '\n';
            }
            case HandShakeRequestType::Probe: return "{\"status\":\"success\"}\n";
            default: return std::nullopt;
        }
    }

    // Has everything that is known fetched anew now and then.
    class Refresher {
       public:
        Refresher(ClientMetadata& metadata, std::chrono::seconds interval)
            : thread_([this, &metadata, interval] { run(metadata, interval); }, [this] { stop_.signal(); }) {}

       private:
        void run(ClientMetadata& metadata, std::chrono::milliseconds interval) {
            const auto pause = static_cast<int>(std::min<std::chrono::milliseconds::rep>(interval.count(), INT_MAX));
            pollfd stop = {stop_.number(), POLLIN, 0};
            for (;;) {
                const int told = poll(&stop, 1, pause);
                if (told > 0) return;
                if (told == 0) metadata.sync("");
            }
        }

        Event stop_;
        Thread thread_;
    };

    const bool caches_;
    std::unique_ptr<Store> store_;  // null with P2PHANDSHAKE
    std::string prefix_ = "mooncake/";

    std::mutex lock_;
    std::unordered_map<SegmentID, std::shared_ptr<SegmentDesc>> segments_;
    std::unordered_map<std::string, SegmentID> ids_;
    SegmentID next_id_ = LOCAL_SEGMENT_ID + 1;
    RpcMetaDesc address_;
    OnReceiveHandShake on_receive_handshake_;
    std::vector<NotifyDesc> notifications_;

    std::mutex server_lock_;
    std::unique_ptr<HandshakeServer> server_;
    std::optional<Refresher> refresher_;
};

}  // namespace

std::unique_ptr<TransferMetadata::Source> client_metadata(const std::string& conn_string) {
    return std::make_unique<ClientMetadata>(conn_string);
}

}  // namespace mooncake::transfer_engine_cxx
