// What the class holds of the system: descriptors and threads.
#pragma once

#include <sys/eventfd.h>
#include <unistd.h>

#include <cerrno>
#include <functional>
#include <system_error>
#include <thread>
#include <utility>

namespace mooncake::transfer_engine_cxx {

// Closed with this object; a negative number is none.
class FileDescriptor {
   public:
    explicit FileDescriptor(int number) : number_(number) {}
    FileDescriptor(FileDescriptor&& other) noexcept : number_(std::exchange(other.number_, -1)) {}
    ~FileDescriptor() {
        if (number_ >= 0) ::close(number_);
    }

    // What a call has made; throws std::system_error if it has failed.
    static FileDescriptor made(int number) {
        if (number < 0) throw std::system_error(errno, std::generic_category());
        return FileDescriptor(number);
    }

    int number() const { return number_; }
    // Not closed any more: whoever takes it does that.
    int release() { return std::exchange(number_, -1); }

   private:
    int number_;
};

// Readable once it is signalled. Throws std::system_error if there is no descriptor for it.
class Event {
   public:
    int number() const { return descriptor_.number(); }
    void signal() { eventfd_write(descriptor_.number(), 1); }

   private:
    FileDescriptor descriptor_ = FileDescriptor::made(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
};

// A thread that is told to end, and awaited, where this object ends. In a child of fork there is no such thread: it is not awaited there, nor
// told, since what it listens to is the parent's.
class Thread {
   public:
    // `stop` has `run` return. Throws std::system_error if there can be no thread.
    Thread(std::function<void()> run, std::function<void()> stop) : stop_(std::move(stop)), thread_(std::move(run)) {}
    Thread(const Thread&) = delete;
    ~Thread() {
        if (getpid() != process_) {
            thread_.detach();
            return;
        }
        stop_();
        thread_.join();
    }

   private:
    const pid_t process_ = getpid();
    const std::function<void()> stop_;
    std::thread thread_;
};

}  // namespace mooncake::transfer_engine_cxx
