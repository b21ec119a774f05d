// Stands in for glog where that is not installed: what programs need of it that take it from the headers of the transfer engine. Lines go
// to standard error; FATAL, CHECK and its like end the process, as glog's do. VLOG and DCHECK are compiled and do nothing.
#pragma once

#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <sstream>
#include <string>

// Not in namespace google: a module that is built with this must not take the place of glog in one that is not.
namespace mooncake::transfer_engine_cxx::stand_in {

using LogSeverity = int;
const LogSeverity FATAL = 3;

inline void InitGoogleLogging(const char*) {}
inline void ShutdownGoogleLogging() {}

// One line, written when it goes out of scope.
class LogMessage {
   public:
    LogMessage(const char* file, int line, LogSeverity severity) : severity_(severity) {
        const char* base = std::strrchr(file, '/');
        text_ << "IWEF"[severity] << ' ' << (base ? base + 1 : file) << ':' << line << "] ";
    }
    LogMessage(const LogMessage&) = delete;
    LogMessage& operator=(const LogMessage&) = delete;
    ~LogMessage() {
        text_ << '\n';
        std::string line = text_.str();
        std::fwrite(line.data(), 1, line.size(), stderr);
        if (severity_ == FATAL) std::abort();
    }
    std::ostream& stream() { return text_; }

   private:
    std::ostringstream text_;
    LogSeverity severity_;
};

// With the text of errno at its end.
class ErrnoLogMessage {
   public:
    ErrnoLogMessage(const char* file, int line, LogSeverity severity) : error_(errno), message_(file, line, severity) {}
    ~ErrnoLogMessage() { message_.stream() << ": " << std::strerror(error_) << " [" << error_ << "]"; }
    std::ostream& stream() { return message_.stream(); }

   private:
    int error_;
    LogMessage message_;
};

// Makes a stream the operand of ?: beside void.
struct LogMessageVoidify {
    void operator&(std::ostream&) {}
};

}  // namespace mooncake::transfer_engine_cxx::stand_in

namespace google {

using mooncake::transfer_engine_cxx::stand_in::InitGoogleLogging;
using mooncake::transfer_engine_cxx::stand_in::LogSeverity;
using mooncake::transfer_engine_cxx::stand_in::ShutdownGoogleLogging;

const int INFO = 0;
const int WARNING = 1;
const int ERROR = 2;
const int FATAL = 3;
const int GLOG_INFO = INFO;
const int GLOG_WARNING = WARNING;
const int GLOG_ERROR = ERROR;
const int GLOG_FATAL = FATAL;

}  // namespace google

#define TRANSFER_ENGINE_LOG_IF(type, severity, condition) \
    !(condition) ? (void)0 : ::mooncake::transfer_engine_cxx::stand_in::LogMessageVoidify() & ::mooncake::transfer_engine_cxx::stand_in::type(__FILE__, __LINE__, ::google::severity).stream()

#define LOG(severity) ::mooncake::transfer_engine_cxx::stand_in::LogMessage(__FILE__, __LINE__, ::google::severity).stream()
#define LOG_IF(severity, condition) TRANSFER_ENGINE_LOG_IF(LogMessage, severity, condition)
#define PLOG(severity) ::mooncake::transfer_engine_cxx::stand_in::ErrnoLogMessage(__FILE__, __LINE__, ::google::severity).stream()
#define PLOG_IF(severity, condition) TRANSFER_ENGINE_LOG_IF(ErrnoLogMessage, severity, condition)
#define DLOG(severity) LOG_IF(severity, false)

#define VLOG_IS_ON(level) ((void)(level), false)
#define VLOG(level) LOG_IF(INFO, VLOG_IS_ON(level))

#define CHECK(condition) LOG_IF(FATAL, !(condition)) << "Check failed: " #condition " "
#define PCHECK(condition) PLOG_IF(FATAL, !(condition)) << "Check failed: " #condition " "
#define CHECK_EQ(left, right) CHECK((left) == (right))
#define CHECK_NE(left, right) CHECK((left) != (right))
#define CHECK_LT(left, right) CHECK((left) < (right))
#define CHECK_LE(left, right) CHECK((left) <= (right))
#define CHECK_GT(left, right) CHECK((left) > (right))
#define CHECK_GE(left, right) CHECK((left) >= (right))

#define DCHECK(condition) LOG_IF(FATAL, false && !(condition))
#define DCHECK_EQ(left, right) DCHECK((left) == (right))
#define DCHECK_NE(left, right) DCHECK((left) != (right))
#define DCHECK_LT(left, right) DCHECK((left) < (right))
#define DCHECK_LE(left, right) DCHECK((left) <= (right))
#define DCHECK_GT(left, right) DCHECK((left) > (right))
#define DCHECK_GE(left, right) DCHECK((left) >= (right))
