// Memory of devices that several ranks map at the same address. It takes memory management of a vendor's driver, which this library does
// not drive: Supported() is false and Create() gives NotImplemented. Programs that ask first, as upstream's do, go on without.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "common/base/status.h"
#include "transfer_engine_cxx/export.h"

namespace mooncake {

struct SharedSegmentOptions {
    uint32_t world_size = 1;
    uint32_t rank_id = 0;
    uint32_t owner_rank = 0;
    int32_t device_id = 0;
    bool mmap = true;
    bool host_register = false;
};

class TRANSFER_ENGINE_CXX_API SharedSegment {
   public:
    SharedSegment(const SharedSegment&) = delete;
    SharedSegment& operator=(const SharedSegment&) = delete;
    ~SharedSegment();

    static Status Create(const std::string& name, uint64_t size, const SharedSegmentOptions& options,
                         std::shared_ptr<SharedSegment>& segment, std::string& handle);
    static bool Supported(bool mmap = true, bool host_register = false);

    Status Complete(const std::vector<std::string>& handles);

    bool ready() const;
    uintptr_t base_addr() const;
    uint64_t size() const;
    uintptr_t device_addr() const;

   private:
    SharedSegment();
};

}  // namespace mooncake
