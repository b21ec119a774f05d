#include "json_value.h"

#include <charconv>
#include <cmath>
#include <cstdio>

namespace mooncake::transfer_engine_cxx {

namespace {

// Reads at the beginning of `rest_` and takes away what it has read. False: no JSON.
class Reader {
   public:
    explicit Reader(std::string_view text) : rest_(text) {}

    bool document(JsonValue& value) { return read(value, 0) && (space(), rest_.empty()); }

   private:
    static constexpr int kDeepest = 64;

    void space() {
        size_t end = rest_.find_first_not_of(" \t\r\n");
        rest_.remove_prefix(end == rest_.npos ? rest_.size() : end);
    }
    bool take(std::string_view token) {
        if (!rest_.starts_with(token)) return false;
        rest_.remove_prefix(token.size());
        return true;
    }

    bool read(JsonValue& value, int depth) {
        if (depth > kDeepest) return false;
        space();
        if (rest_.empty()) return false;
        switch (rest_.front()) {
            case '{': return object(value.value.emplace<JsonObject>(), depth);
            case '[': return array(value.value.emplace<JsonArray>(), depth);
            case '"': return string(value.value.emplace<std::string>());
            case 't': value.value = true; return take("true");
            case 'f': value.value = false; return take("false");
            case 'n': value.value = nullptr; return take("null");
            default: return number(value);
        }
    }

    bool object(JsonObject& members, int depth) {
        take("{");
        space();
        if (take("}")) return true;
        do {
            space();
            std::string name;
            JsonValue value;
            if (!string(name)) return false;
            space();
            if (!take(":") || !read(value, depth + 1)) return false;
            members.emplace_back(std::move(name), std::move(value));
            space();
        } while (take(","));
        return take("}");
    }

    bool array(JsonArray& elements, int depth) {
        take("[");
        space();
        if (take("]")) return true;
        do {
            if (!read(elements.emplace_back(), depth + 1)) return false;
            space();
        } while (take(","));
        return take("]");
    }

    bool string(std::string& text) {
        if (!take("\"")) return false;
        for (;;) {
            size_t end = 0;
            while (end < rest_.size() && rest_[end] != '"' && rest_[end] != '\\' && static_cast<unsigned char>(rest_[end]) >= 0x20) ++end;
            text.append(rest_.substr(0, end));
            rest_.remove_prefix(end);
            if (take("\"")) return true;
            if (!take("\\") || rest_.empty()) return false;
            char escape = rest_.front();
            rest_.remove_prefix(1);
            switch (escape) {
                case '"': case '\\': case '/': text += escape; break;
                case 'b': text += '\b'; break;
                case 'f': text += '\f'; break;
                case 'n': text += '\n'; break;
                case 'r': text += '\r'; break;
                case 't': text += '\t'; break;
                case 'u':
                    if (!code_point(text)) return false;
                    break;
                default: return false;
            }
        }
    }

    bool code_unit(uint32_t& unit) {
        if (rest_.size() < 4) return false;
        auto [end, error] = std::from_chars(rest_.data(), rest_.data() + 4, unit, 16);
        if (error != std::errc() || end != rest_.data() + 4) return false;
        rest_.remove_prefix(4);
        return true;
    }

    // What follows "\u", of which a second one may be part.
    bool code_point(std::string& text) {
        uint32_t point, low;
        if (!code_unit(point)) return false;
        if (point >= 0xd800 && point < 0xdc00) {
            if (!take("\\u") || !code_unit(low) || low < 0xdc00 || low >= 0xe000) return false;
            point = 0x10000 + ((point - 0xd800) << 10) + (low - 0xdc00);
        } else if (point >= 0xdc00 && point < 0xe000) {
            return false;
        }
        auto tail = [&](int shift) { text += static_cast<char>(0x80 | (point >> shift & 0x3f)); };
        if (point < 0x80) {
            text += static_cast<char>(point);
        } else if (point < 0x800) {
            text += static_cast<char>(0xc0 | point >> 6);
            tail(0);
        } else if (point < 0x10000) {
            text += static_cast<char>(0xe0 | point >> 12);
            tail(6), tail(0);
        } else {
            text += static_cast<char>(0xf0 | point >> 18);
            tail(12), tail(6), tail(0);
        }
        return true;
    }

    size_t digits(size_t from) const {
        size_t end = from;
        while (end < rest_.size() && rest_[end] >= '0' && rest_[end] <= '9') ++end;
        return end - from;
    }

    bool number(JsonValue& value) {
        auto at = [&](size_t index) { return index < rest_.size() ? rest_[index] : '\0'; };
        size_t end = at(0) == '-';
        size_t whole = digits(end);
        if (whole == 0 || (whole > 1 && at(end) == '0')) return false;
        end += whole;
        bool is_whole = true;
        if (at(end) == '.') {
            is_whole = false;
            size_t fraction = digits(end + 1);
            if (fraction == 0) return false;
            end += 1 + fraction;
        }
        if (at(end) == 'e' || at(end) == 'E') {
            is_whole = false;
            end += 1 + (at(end + 1) == '+' || at(end + 1) == '-');
            size_t exponent = digits(end);
            if (exponent == 0) return false;
            end += exponent;
        }
        std::string_view text = rest_.substr(0, end);
        rest_.remove_prefix(end);
        return (is_whole && (convert<uint64_t>(text, value) || convert<int64_t>(text, value))) || convert<double>(text, value);
    }

    template <class T>
    static bool convert(std::string_view text, JsonValue& value) {
        T number{};
        auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
        if (error != std::errc() || end != text.data() + text.size()) return false;
        value.value = number;
        return true;
    }

    std::string_view rest_;
};

}  // namespace

const JsonValue* JsonValue::member(std::string_view name) const {
    const JsonObject* members = as<JsonObject>();
    if (!members) return nullptr;
    // Of several with one name the last counts.
    for (auto member = members->rbegin(); member != members->rend(); ++member) {
        if (member->first == name) return &member->second;
    }
    return nullptr;
}

std::optional<JsonValue> read_json(std::string_view text) {
    JsonValue value;
    if (!Reader(text).document(value)) return std::nullopt;
    return value;
}

void write_json(std::string_view value, std::string& text) {
    text += '"';
    for (char character : value) {
        if (character == '"' || character == '\\') {
            text += '\\';
            text += character;
        } else if (static_cast<unsigned char>(character) < 0x20) {
            char escape[8];
            std::snprintf(escape, sizeof escape, "\\u%04x", character);
            text += escape;
        } else {
            text += character;
        }
    }
    text += '"';
}

void write_json(const JsonValue& value, std::string& text) {
    struct Writer {
        std::string& text;
        void operator()(std::nullptr_t) const { text += "null"; }
        void operator()(bool value) const { text += value ? "true" : "false"; }
        void operator()(uint64_t value) const { text += std::to_string(value); }
        void operator()(int64_t value) const { text += std::to_string(value); }
        void operator()(double value) const {
            char number[32];
            auto end = std::to_chars(number, number + sizeof number, value).ptr;
            text += std::isfinite(value) ? std::string_view(number, end - number) : "null";
        }
        void operator()(const std::string& value) const { write_json(std::string_view(value), text); }
        void operator()(const JsonArray& elements) const {
            text += '[';
            for (size_t i = 0; i < elements.size(); ++i) {
                if (i > 0) text += ',';
                write_json(elements[i], text);
            }
            text += ']';
        }
        void operator()(const JsonObject& members) const {
            text += '{';
            for (size_t i = 0; i < members.size(); ++i) {
                if (i > 0) text += ',';
                write_json(std::string_view(members[i].first), text);
                text += ':';
                write_json(members[i].second, text);
            }
            text += '}';
        }
    };
    std::visit(Writer{text}, value.value);
}

}  // namespace mooncake::transfer_engine_cxx
