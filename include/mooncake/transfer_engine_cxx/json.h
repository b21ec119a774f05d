// Json::Value: jsoncpp's where that is installed, and then TRANSFER_ENGINE_HAS_JSONCPP is defined; else a name only.
//
// The library itself does without jsoncpp. What hands out a Json::Value is therefore inline, made of the library's text by the jsoncpp of
// whoever calls. TRANSFER_ENGINE_WITHOUT_JSONCPP does without although it is there.
#pragma once

#if defined(TRANSFER_ENGINE_WITHOUT_JSONCPP)
#elif __has_include(<json/json.h>)
#include <json/json.h>
#define TRANSFER_ENGINE_HAS_JSONCPP 1
#elif __has_include(<jsoncpp/json/json.h>)
#include <jsoncpp/json/json.h>
#define TRANSFER_ENGINE_HAS_JSONCPP 1
#endif

#ifdef TRANSFER_ENGINE_HAS_JSONCPP
#include <memory>
#include <string>

namespace mooncake::transfer_engine_cxx {

// The value of a text that the library wrote; null for a text that is no JSON.
inline Json::Value parse_json(const std::string& text) {
    Json::Value value;
    std::unique_ptr<Json::CharReader> reader(Json::CharReaderBuilder().newCharReader());
    if (!reader->parse(text.data(), text.data() + text.size(), &value, nullptr)) return Json::Value();
    return value;
}

// A value as the library reads it.
inline std::string write_json(const Json::Value& value) {
    Json::StreamWriterBuilder builder;
    builder["indentation"] = "";
    return Json::writeString(builder, value);
}

}  // namespace mooncake::transfer_engine_cxx
#else
namespace Json {
class Value;
}
#endif
