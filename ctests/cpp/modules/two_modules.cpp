// Two extension modules in one process, as an interpreter loads them: they share an engine and the configuration of the process.
#include <dlfcn.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "module.hpp"

#define REQUIRE(condition)                                                                \
    do {                                                                                  \
        if (!(condition)) {                                                               \
            std::fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #condition);          \
            std::exit(1);                                                                 \
        }                                                                                 \
    } while (0)

static void* first;
static void* second;

static void* load(const char* path) {
    void* module = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (module == nullptr) std::fprintf(stderr, "%s\n", dlerror());
    REQUIRE(module != nullptr);
    return module;
}

template <class Function>
static Function find(void* module, const char* name) {
    void* symbol = dlsym(module, name);
    REQUIRE(symbol != nullptr);
    return reinterpret_cast<Function>(symbol);
}

static void an_engine_goes_from_one_module_to_the_other() {
    const Handed handed = find<MakeEngine>(first, "make_engine")();
    find<Release>(first, "release")();
    REQUIRE(find<UseEngine>(second, "use_engine")(handed));
}

static void both_modules_write_and_read_one_configuration() {
    REQUIRE(find<Configuration>(first, "configuration")() == find<Configuration>(second, "configuration")());
    auto read = find<ReadConfiguration>(second, "read_configuration");
    REQUIRE(read(false) == 0);
    find<WriteConfiguration>(first, "write_configuration")(true, 12345);
    REQUIRE(read(false) == 1 && read(true) == 12345);
}

static void the_type_of_the_engine_is_one() {
    const std::type_info* one = find<EngineType>(first, "engine_type")();
    const std::type_info* other = find<EngineType>(second, "engine_type")();
    REQUIRE(*one == *other && std::strcmp(one->name(), other->name()) == 0);
}

int main() {
    first = load(FIRST_MODULE);
    second = load(SECOND_MODULE);
    an_engine_goes_from_one_module_to_the_other();
    both_modules_write_and_read_one_configuration();
    the_type_of_the_engine_is_one();
}
