// A metadata server, by te_store of the C interface.
#pragma once

#include <te.h>

#include <optional>
#include <string>

namespace mooncake::transfer_engine_cxx {

class Store {
   public:
    // Throws std::runtime_error if there is no such kind of server.
    explicit Store(const std::string& conn_string);
    Store(const Store&) = delete;
    Store& operator=(const Store&) = delete;
    ~Store();

    // Nothing if there is no such key, or the server fails.
    std::optional<std::string> get(const std::string& key);
    bool put(const std::string& key, const std::string& text);
    bool remove(const std::string& key);

   private:
    te_store* store_;
};

}  // namespace mooncake::transfer_engine_cxx
