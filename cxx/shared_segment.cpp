#include "shared_segment/shared_segment.h"

namespace mooncake {
namespace {

Status not_implemented() {
    return Status::NotImplemented("shared segments take a vendor's device memory management, which this library does not drive");
}

}  // namespace

SharedSegment::SharedSegment() = default;
SharedSegment::~SharedSegment() = default;

Status SharedSegment::Create(const std::string&, uint64_t, const SharedSegmentOptions&, std::shared_ptr<SharedSegment>&, std::string&) {
    return not_implemented();
}

bool SharedSegment::Supported(bool, bool) { return false; }

Status SharedSegment::Complete(const std::vector<std::string>&) { return not_implemented(); }

bool SharedSegment::ready() const { return false; }
uintptr_t SharedSegment::base_addr() const { return 0; }
uint64_t SharedSegment::size() const { return 0; }
uintptr_t SharedSegment::device_addr() const { return 0; }

}  // namespace mooncake
