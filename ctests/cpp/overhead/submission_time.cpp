// What the class adds to the C function beneath it, in nanoseconds for each request that is submitted. A benchmark, no test: it fails at
// nothing. Argument: requests in a submission (1 and 256).
#include <algorithm>
#include <chrono>

#include "submission.hpp"

using Clock = std::chrono::steady_clock;

static double nanoseconds(Clock::duration duration) { return std::chrono::duration<double, std::nano>(duration).count(); }

static void measure(std::size_t count) {
    Submission submission(count);
    const int runs = count < 16 ? 20000 : 2000;
    std::vector<double> by_class, by_c, difference;
    Clock::time_point start;
    // In turn, so that both see the same machine.
    for (int run = 0; run < runs; run++) {
        double one = 0, other = 0;
        submission.run_by_class([&] { start = Clock::now(); }, [&] { one = nanoseconds(Clock::now() - start) / count; });
        submission.run_by_c([&] { start = Clock::now(); }, [&] { other = nanoseconds(Clock::now() - start) / count; });
        by_class.push_back(one);
        by_c.push_back(other);
        difference.push_back(one - other);
    }
    auto quantile = [](std::vector<double>& values, double part) {
        std::sort(values.begin(), values.end());
        return values[static_cast<std::size_t>(part * (values.size() - 1))];
    };
    std::printf("%6zu requests: class %7.1f ns, C %7.1f ns a request (medians of %d); difference %6.1f ns (quartiles %.1f to %.1f)\n", count,
                quantile(by_class, 0.5), quantile(by_c, 0.5), runs, quantile(difference, 0.5), quantile(difference, 0.25),
                quantile(difference, 0.75));
}

int main(int argc, char** argv) {
    if (argc > 1) {
        measure(std::strtoull(argv[1], nullptr, 10));
        return 0;
    }
    for (std::size_t count : {1, 16, 256}) measure(count);
}
