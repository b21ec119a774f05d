// What a C++ engine wraps around te.h: ownership by RAII, failures as exceptions. Nothing here is particular to the demo.
#pragma once

#include <te.h>

#include <sys/mman.h>

#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

class EngineError : public std::runtime_error {
public:
    EngineError(const std::string& what, te_status status)
        : std::runtime_error(what + ": " + te_status_name(status) + ": " + te_last_error()), status_(status) {}
    te_status status() const { return status_; }

private:
    te_status status_;
};

inline void check(te_status status, const char* what) {
    if (status != 0) throw EngineError(what, status);
}

// Pages straight from the kernel, as an engine's cache has them.
class Memory {
public:
    explicit Memory(std::size_t length) : length_(length) {
        address_ = mmap(nullptr, length, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (address_ == MAP_FAILED) throw std::system_error(errno, std::generic_category(), "mmap");
    }
    ~Memory() { munmap(address_, length_); }
    Memory(const Memory&) = delete;
    Memory& operator=(const Memory&) = delete;

    unsigned char* data() const { return static_cast<unsigned char*>(address_); }
    std::size_t size() const { return length_; }

private:
    void* address_;
    std::size_t length_;
};

struct Notification {
    std::string name;
    std::string message;
};

class Engine {
public:
    // Every peer of the demo is on this machine.
    Engine() {
        te_engine_options options{};
        options.struct_size = sizeof options;
        options.metadata = "P2PHANDSHAKE";
        options.server_name = "127.0.0.1";
        options.transport = "tcp";
        te_engine* engine = nullptr;
        check(te_engine_create(&options, &engine), "cannot create an engine");
        engine_.reset(engine);
    }

    te_engine* get() const { return engine_.get(); }

    // The name under which peers open this engine's segment.
    std::string address() const {
        char text[256];
        check(te_engine_address(get(), text, sizeof text), "cannot tell the address");
        return text;
    }

    void register_memory(void* address, std::size_t length) const {
        check(te_register_local_memory(get(), address, length, nullptr), "cannot register memory");
    }
    void unregister_memory(void* address) const {
        check(te_unregister_local_memory(get(), address), "cannot unregister memory");
    }

    te_segment open(const std::string& name) const {
        te_segment segment;
        check(te_open_segment(get(), name.c_str(), &segment), "cannot open the peer's segment");
        return segment;
    }

    // What the peer has registered, in the order of its registrations.
    std::vector<te_memory_region> regions(te_segment segment) const {
        std::size_t count = 0;
        check(te_list_segment_memory(get(), segment, nullptr, sizeof(te_memory_region), 0, &count),
              "cannot list the peer's memory");
        std::vector<te_memory_region> regions(count);
        check(te_list_segment_memory(get(), segment, regions.data(), sizeof(te_memory_region), regions.size(), &count),
              "cannot list the peer's memory");
        if (count != regions.size()) throw std::runtime_error("the peer's memory changed while it was listed");
        return regions;
    }

    // Returns when all requests have completed; throws when one did not.
    void transfer(const std::vector<te_transfer_request>& requests) const {
        check(te_batch_transfer(get(), requests.data(), sizeof(te_transfer_request), requests.size(), nullptr, nullptr, 0),
              "a transfer failed");
    }

    void notify(te_segment segment, const Notification& notification) const {
        check(te_notify(get(), segment, notification.name.c_str(), notification.message.c_str()), "cannot notify the peer");
    }

    std::vector<Notification> take_notifications() const {
        te_notification* list = nullptr;
        std::size_t count = 0;
        check(te_take_notifications(get(), &list, &count), "cannot take notifications");
        std::vector<Notification> notifications;
        for (std::size_t i = 0; i < count; ++i) notifications.push_back({list[i].name, list[i].message});
        te_free_notifications(list, count);
        return notifications;
    }

private:
    struct Destroy {
        void operator()(te_engine* engine) const { te_engine_destroy(engine); }
    };
    std::unique_ptr<te_engine, Destroy> engine_;
};

// A batch whose transfers run while the caller does something else. It must not outlive its engine.
class Batch {
public:
    Batch(const Engine& engine, std::size_t capacity) : engine_(engine.get()) {
        check(te_batch_create(engine_, capacity, &batch_), "cannot create a batch");
    }
    ~Batch() {
        // The caller's buffers may go away after this, so nothing may be under way any more.
        te_batch_cancel(engine_, batch_);
        te_batch_wait(engine_, batch_, -1, nullptr);
        te_batch_free(engine_, batch_);
    }
    Batch(const Batch&) = delete;
    Batch& operator=(const Batch&) = delete;

    void submit(const std::vector<te_transfer_request>& requests) {
        check(te_batch_submit(engine_, batch_, requests.data(), sizeof(te_transfer_request), requests.size(), nullptr),
              "cannot submit transfers");
        submitted_ += requests.size();
    }

    void wait() {
        te_batch_status status{};
        status.struct_size = sizeof status;
        check(te_batch_wait(engine_, batch_, -1, &status), "cannot wait for a batch");
        if (status.failed == 0) return;
        for (std::size_t task = 0; task < submitted_; ++task) {
            char text[512];
            if (te_batch_task_error(engine_, batch_, task, text, sizeof text) == 0 && text[0] != '\0')
                throw std::runtime_error("transfer " + std::to_string(task) + " of a batch failed: " + text);
        }
        throw std::runtime_error(std::to_string(status.failed) + " transfers of a batch failed");
    }

private:
    te_engine* engine_;
    te_batch batch_ = 0;
    std::size_t submitted_ = 0;
};
