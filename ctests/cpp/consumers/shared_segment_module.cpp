// The Python module's shared segments, without Python.
#include <shared_segment/shared_segment.h>

#include <memory>

#include "check.hpp"

using namespace mooncake;

static_assert(std::is_aggregate_v<SharedSegmentOptions>);
static_assert(SharedSegmentOptions{}.world_size == 1 && SharedSegmentOptions{}.rank_id == 0 && SharedSegmentOptions{}.owner_rank == 0);
static_assert(SharedSegmentOptions{}.device_id == 0 && SharedSegmentOptions{}.mmap && !SharedSegmentOptions{}.host_register);
static_assert(!std::is_copy_constructible_v<SharedSegment> && !std::is_copy_assignable_v<SharedSegment>);
static_assert(std::is_destructible_v<SharedSegment>);
static_assert(std::is_same_v<decltype(std::declval<const SharedSegment&>().ready()), bool>);
static_assert(std::is_same_v<decltype(std::declval<const SharedSegment&>().base_addr()), std::uintptr_t>);
static_assert(std::is_same_v<decltype(std::declval<const SharedSegment&>().device_addr()), std::uintptr_t>);
static_assert(std::is_same_v<decltype(std::declval<const SharedSegment&>().size()), std::uint64_t>);

// Where it is not supported, which is told, no segment is made, and the reason is told.
static void a_segment_is_made_where_that_is_supported() {
    SharedSegmentOptions options;
    options.world_size = 1;
    options.mmap = true;
    const bool supported = SharedSegment::Supported(options.mmap, options.host_register);
    EXPECT(SharedSegment::Supported(), SharedSegment::Supported(true, false));
    std::shared_ptr<SharedSegment> segment;
    std::string handle;
    Status status = SharedSegment::Create("a segment", 1 << 20, options, segment, handle);
    EXPECT(supported, status.ok());
    if (!supported) {
        REQUIRE(segment == nullptr);
        REQUIRE(status.IsNotImplemented());
        REQUIRE(status.ToString().size() > std::string("NotImplemented: ").size());
        return;
    }
    SUCCEEDS(segment->Complete({handle}));
    REQUIRE(segment->ready() && segment->base_addr() != 0 && segment->size() >= 1 << 20);
    REQUIRE(status == Status::OK());
}

int main() { a_segment_is_made_where_that_is_supported(); }
