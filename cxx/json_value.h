// JSON as far as descriptors need it, so that the library does without jsoncpp. Reading is strict: the text is one value of RFC 8259, and
// what does not have the expected type is an error. A number is a whole one of 64 bits, or a double.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

namespace mooncake::transfer_engine_cxx {

struct JsonValue;
using JsonArray = std::vector<JsonValue>;
using JsonObject = std::vector<std::pair<std::string, JsonValue>>;  // in the order of the text

struct JsonValue {
    // Whole numbers from 0 on are unsigned, those below signed.
    std::variant<std::nullptr_t, bool, uint64_t, int64_t, double, std::string, JsonArray, JsonObject> value = nullptr;

    // Null if it is of another type.
    template <class T>
    const T* as() const {
        return std::get_if<T>(&value);
    }
    // The member of that name, null if there is none.
    const JsonValue* member(std::string_view name) const;
};

// The value of a text; nothing if it is no JSON, or nested more than 64 deep.
std::optional<JsonValue> read_json(std::string_view text);

// Compact, with members in the order that they have.
void write_json(const JsonValue& value, std::string& text);

// A text in quotes.
void write_json(std::string_view value, std::string& text);

}  // namespace mooncake::transfer_engine_cxx
