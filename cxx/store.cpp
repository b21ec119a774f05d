#include "store.h"

#include <stdexcept>

#include "results.h"

namespace mooncake::transfer_engine_cxx {

Store::Store(const std::string& conn_string) {
    if (te_store_open(conn_string.c_str(), &store_) != 0) throw std::runtime_error(te_last_error());
}

Store::~Store() { te_store_close(store_); }

std::optional<std::string> Store::get(const std::string& key) {
    char* text = nullptr;
    te_status status = te_store_get(store_, key.c_str(), &text);
    if (status != 0 || !text) return std::nullopt;
    return take_text(status, text);
}

bool Store::put(const std::string& key, const std::string& text) { return te_store_put(store_, key.c_str(), text.c_str()) == 0; }

bool Store::remove(const std::string& key) { return te_store_remove(store_, key.c_str()) == 0; }

}  // namespace mooncake::transfer_engine_cxx
